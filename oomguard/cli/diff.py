"""Run ``oomguard diff``: compare the logs of a start that worked and of one that failed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import click

from oomguard.cli.options import (
    color_option,
    console,
    form_of,
    option,
    policy_options,
    read_policy,
    read_rules,
)

if TYPE_CHECKING:
    from oomguard.comparison.comparison import Comparison

FORMS: Final = ("terminal", "json", "markdown")


@click.command("diff")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@option(
    "--format",
    "form",
    default="terminal",
    show_default=True,
    metavar="[terminal|json|markdown]",
    help="Output format of the comparison.",
)
@option(
    "--old-start",
    type=click.IntRange(1),
    metavar="N",
    help="Number of the start in OLD. [default: the last one with figures]",
)
@option(
    "--new-start",
    type=click.IntRange(1),
    metavar="N",
    help="Number of the start in NEW. [default: the last one with figures]",
)
@option("--exit-code", is_flag=True, help="Exit with status 1 if the two starts differ.")
@policy_options
@option(
    "--no-mask",
    is_flag=True,
    help="Print secrets, prompts and home folders as they are in the logs.",
)
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    old: str,
    new: str,
    form: str,
    old_start: int | None,
    new_start: int | None,
    exit_code: bool,
    allow: str | None,
    pinned: tuple[str, ...],
    floors: tuple[str, ...],
    rules: tuple[str, ...],
    no_mask: bool,
    color: str,
) -> int:
    """Compare the start in OLD with the start in NEW: versions, settings and memory.

    OLD is the log of a start that worked, and NEW the log of a start that failed. One of them may
    be - for standard input. oomguard reads gzip, zstd, xz and bzip2 directly.

    Exit status: 0 after success, 1 with --exit-code if anything differs, 2 after bad usage or if an
    input is unreadable or contains no engine start.
    """
    from oomguard.comparison.diff import diff_logs
    from oomguard.report.redact import unmasked

    form = form_of(ctx, form, FORMS)
    policy = read_policy(allow, pinned, floors)
    rule_set = read_rules(rules)
    comparison = diff_logs(
        old, new, old_start=old_start, new_start=new_start, policy=policy, rules=rule_set
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
