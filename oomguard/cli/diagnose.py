"""``oomguard diagnose``: saved logs in, panel, JSON lines, Markdown or HTML out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from oomguard.cli.options import console, option, output_options, policy_options, read_policy, read_rules, size_bytes
from oomguard.errors import InputError, SettingError
from oomguard.facts import Fact
from oomguard.incident import Diagnosis, SettingInForce
from oomguard.remedy.settings import parse_assignment


@click.command("diagnose")
@click.argument("paths", nargs=-1, metavar="[PATH …|-]")
@option(
    "--format",
    "form",
    type=click.Choice(["terminal", "json", "markdown", "html"]),
    default="terminal",
    show_default=True,
    help="Output form.",
)
@option("--gpu-memory", metavar="SIZE", help="The device's total memory, where the log leaves it out: 24GiB.")
@option(
    "--set",
    "given",
    multiple=True,
    metavar="SETTING=VALUE",
    help="A setting in force that the log leaves out. Repeatable.",
)
@option("--exit-code", is_flag=True, help="Exit with 1 when an out-of-memory was found.")
@policy_options
@output_options
def command(
    paths: tuple[str, ...], form: str, gpu_memory: str | None, given: tuple[str, ...], exit_code: bool, allow: str | None,
    pin: tuple[str, ...], minimum: tuple[str, ...], rules: tuple[str, ...], quiet: bool, verbose: bool, color: str,
) -> int:  # fmt: skip
    """Say why memory ran out: each incident with its numbers, its cause, and what to change.

    PATH is a log, a folder of logs, or - for standard input. Exit status: 0 ran, 2 bad usage or an unreadable input
    (after all the rest is done), 1 with --exit-code when an out-of-memory was found.
    """
    from oomguard.cli import show_error
    from oomguard.diagnosing import diagnose_lines
    from oomguard.observe.source import open_log, read_lines

    if not paths:
        if sys.stdin.isatty():
            raise click.UsageError("name a log, a folder, or - for standard input: oomguard diagnose error.log")
        paths = ("-",)
    policy, rule_set = read_policy(allow, pin, minimum), read_rules(rules)
    facts, settings = _given(gpu_memory, given)
    failed = found = False
    for path in _expand(paths):
        try:
            if path == "-":
                diagnosis = diagnose_lines(
                    read_lines(sys.stdin.buffer), "-", rules=rule_set, policy=policy, given=facts, settings=settings
                )
            else:
                with open_log(path) as stream:
                    diagnosis = diagnose_lines(
                        read_lines(stream), path, rules=rule_set, policy=policy, given=facts, settings=settings
                    )
        except InputError as error:
            show_error(error)
            failed = True
            continue
        except OSError as error:
            show_error(InputError(f"{path}: {error.strerror or error}"))
            failed = True
            continue
        found = found or diagnosis.verdict == "oom"
        show(diagnosis, form, color)
    if failed:
        return 2
    return 1 if exit_code and found else 0


def _given(gpu_memory: str | None, assignments: tuple[str, ...]) -> tuple[dict[str, Fact], dict[str, SettingInForce]]:
    total = size_bytes(gpu_memory)
    if total is not None and total <= 0:
        raise SettingError(f"--gpu-memory is {gpu_memory}", hint="give the device's total memory, for example 24GiB")
    facts = {} if total is None else {"device_total_bytes": Fact("device_total_bytes", total, "given")}
    settings = {}
    for text in assignments:
        name, value = parse_assignment(text)
        settings[name] = SettingInForce(name, value, None, "given")
    return facts, settings


def _expand(paths: tuple[str, ...]) -> Iterator[str]:
    for path in paths:
        if path != "-" and Path(path).is_dir():
            yield from (str(child) for child in sorted(Path(path).iterdir()) if child.is_file())
        else:
            yield path


def show(diagnosis: Diagnosis, form: str, color: str) -> None:
    """Print one diagnosis in one of the forms."""
    if form == "json":
        from oomguard.report.json import to_json

        click.echo(to_json(diagnosis))
    elif form == "markdown":
        from oomguard.report.markdown import to_markdown

        click.echo(to_markdown(diagnosis))
    elif form == "html":
        from oomguard.report.html import to_html

        click.echo(to_html(diagnosis))
    else:
        from oomguard.report.terminal import print_diagnosis

        print_diagnosis(console(color), diagnosis)
