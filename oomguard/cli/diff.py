"""``oomguard diff``: two logs in, what changed between a start that worked and one that did not."""

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
    help="Output form.",
)
@option(
    "--old-start",
    type=click.IntRange(1),
    metavar="N",
    help="Which start of OLD. [default: the last one with figures]",
)
@option(
    "--new-start",
    type=click.IntRange(1),
    metavar="N",
    help="Which start of NEW. [default: the last one with figures]",
)
@option("--exit-code", is_flag=True, help="Exit with 1 when the two starts differ.")
@policy_options
@option(
    "--no-mask",
    is_flag=True,
    help="Print secrets, prompts and home folders as they stand in the logs.",
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
    """Say what changed from the start in OLD to the start in NEW: versions, settings, each part of
    the memory.

    OLD and NEW are logs, the one of a start that worked and the one of a start that did not; one of
    them may be - for standard input. gzip, zstd, xz and bzip2 are read directly.

    Exit status: 0 ran, 2 bad usage, an unreadable input or one without an engine's start, 1 with
    --exit-code when anything differs.
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
    # What other programs read is UTF-8 whatever the terminal speaks.
    click.echo(text.encode("utf-8", "backslashreplace"), nl=False)
