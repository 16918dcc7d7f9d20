"""Run ``oomguard diff``: compare the logs of a start that worked and of one that failed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from oomguard.cli.command import GroupedCommand
from oomguard.cli.options import (
    Count,
    color_option,
    console,
    format_option,
    option,
    read_rules,
    rules_option,
)
from oomguard.remedy.policy import Policy

if TYPE_CHECKING:
    from oomguard.comparison.comparison import Comparison


@click.command(
    "diff",
    cls=GroupedCommand,
    common=("form", "old_start", "new_start", "exit_code"),
    example="oomguard diff worked.log failed.log",
)
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
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
def command(
    old: str,
    new: str,
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

    Exit status: 0 after success, 1 with --exit-code if anything differs, 2 after a usage error or
    if an input is unreadable or contains no engine start.
    """
    from oomguard.comparison.diff import diff_logs
    from oomguard.report.redact import unmasked

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
