"""Run ``oomguard diff``: compare two logs of a start, or one start under two versions of vLLM."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from oomguard.cli.options import (
    Count,
    GroupedCommand,
    color_option,
    console,
    console_of,
    format_option,
    option,
    read_rules,
    rules_option,
)
from oomguard.core.errors import UsageError
from oomguard.remedy.policy import Policy

if TYPE_CHECKING:
    from oomguard.comparison import Comparison


@click.command(
    "diff",
    cls=GroupedCommand,
    common=("form", "old_start", "new_start", "exit_code"),
    example="oomguard diff worked.log failed.log",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.argument("start", metavar="[MODEL …]", nargs=-1, type=click.UNPROCESSED)
@option(
    "--upgrade",
    is_flag=True,
    help="Plan MODEL with vLLM OLD and NEW, with any option of plan, and compare both.",
)
@format_option("the comparison")
@option(
    "--old-start",
    type=Count(1),
    help="Number of the start in OLD, counted from 1.",
    show_default="the last one with figures",
    example="1",
)
@option(
    "--new-start",
    type=Count(1),
    help="Number of the start in NEW, counted from 1.",
    show_default="the last one with figures",
    example="2",
)
@option("--exit-code", is_flag=True, help="Exit with status 1 if the two starts differ.")
@rules_option
@option(
    "--no-mask",
    is_flag=True,
    help="Print secrets, prompts and home folders as they are in the logs.",
)
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    old: str,
    new: str,
    start: tuple[str, ...],
    upgrade: bool,
    form: str,
    old_start: int | None,
    new_start: int | None,
    exit_code: bool,
    rules: tuple[str, ...],
    no_mask: bool,
    color: str,
) -> int:
    """Compare the start in OLD with the start in NEW: versions, settings and memory.

    OLD is the log of a start that worked, and NEW the log of a start that failed. One of them may
    be - for standard input. Both may be compressed.

    With --upgrade, OLD and NEW are versions of vLLM, and MODEL takes the options of oomguard plan.
    The table then shows how the two versions' defaults and memory accounting differ for this model.

    Exit status: 0 after success, or with --exit-code 1 if anything differs. 2 after a usage error,
    or if an input is unreadable or contains no engine start.
    """
    if upgrade:
        return _compare_versions(old, new, start, form, color, exit_code=exit_code)
    if start:
        # click would otherwise take an unknown option for a start.
        if start[0].startswith("-"):
            raise click.NoSuchOption(start[0], ctx=ctx)
        raise click.UsageError(f"Got unexpected extra argument ({start[0]})", ctx=ctx)
    from oomguard.comparison import diff_logs
    from oomguard.core.redact import unmasked

    rule_set = read_rules(rules)
    comparison = diff_logs(
        old, new, old_start=old_start, new_start=new_start, policy=Policy(), rules=rule_set
    )
    with unmasked() if no_mask else contextlib.nullcontext():
        _show(comparison, form, color)
    if exit_code and comparison.differs:
        return 1
    return 0


def _show(comparison: Comparison, form: str, color: str) -> None:
    from oomguard.report.diff import print_difference, to_difference_json, to_difference_markdown

    if form == "terminal":
        print_difference(console(color), comparison)
        return
    if form == "json":
        text = to_difference_json(comparison) + "\n"
    else:
        text = to_difference_markdown(comparison)
    # Text for other programs is UTF-8, whatever the terminal's encoding.
    click.echo(text.encode("utf-8", "backslashreplace"), nl=False)


def _compare_versions(
    old: str, new: str, start: tuple[str, ...], form: str, color: str, *, exit_code: bool
) -> int:
    """Print what an upgrade changes; return 1 with ``exit_code`` if the start may not fit then."""
    from oomguard.cli import plan
    from oomguard.planning.upgrade import plan_upgrade
    from oomguard.report.json import json_line
    from oomguard.report.upgrade import print_upgrade, upgrade_record

    if not start:
        raise UsageError(
            "--upgrade needs a model", hint="oomguard diff --upgrade 0.19.1 0.31.0 Qwen/Qwen3-8B"
        )
    context = plan.command.make_context("oomguard diff --upgrade", list(start))
    options: dict[str, Any] = dict(context.params)
    if options["engine"] != "vllm" or options["sweep"] or options["solve"] or options["ask_engine"]:
        raise UsageError(
            "--upgrade compares two plans of vLLM",
            hint="leave out --engine, --sweep, --solve and --ask-engine",
        )
    requests = []
    for version in (old, new):
        requests.append(plan.start_request(context, **{**options, "engine_version": version}))
    upgrade = plan_upgrade(*requests)
    if form == "json":
        click.echo(json_line(upgrade_record(upgrade)))
    else:
        print_upgrade(console_of(form, color), upgrade)
    # An unsure plan counts too, because an upgrade has to be safe.
    return int(exit_code and upgrade.new.fit != "yes")
