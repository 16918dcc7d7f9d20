"""``oomguard doctor``: what on this machine matters for memory, what is wrong with it, and what to
do.
"""

from __future__ import annotations

import contextlib

import click

from oomguard.cli.options import (
    color_option,
    console,
    form_of,
    journal_option,
    option,
    rules_option,
)
from oomguard.journal.location import Location

_FORMS = ("terminal", "json")


@click.command("doctor")
@option(
    "--format",
    "form",
    default="terminal",
    show_default=True,
    metavar="[terminal|json]",
    help="Output form.",
)
@option("--exit-code", is_flag=True, help="Exit with 1 when a problem was found.")
@rules_option
@journal_option("Where the journal is")
@option("--no-mask", is_flag=True, help="Print secrets and home folders as they stand.")
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    form: str,
    exit_code: bool,
    rules: tuple[str, ...],
    journal: Location | None,
    no_mask: bool,
    color: str,
) -> int:
    """Look at this machine: versions, devices, the vLLM plugin, variables, limits, what is left
    over.

    Each line is ok, unknown or a problem, with what to do about it. Run it in the environment of
    the engine. Exit status: 0, or 1 with --exit-code when a problem was found.
    """
    from oomguard.cli.doctor_checks import check_machine
    from oomguard.report.doctor import print_checks, to_json
    from oomguard.report.redact import unmasked

    form = form_of(ctx, form, _FORMS)
    checks = list(check_machine(rules=rules, journal=journal, known_variables=known_variables(ctx)))
    with unmasked() if no_mask else contextlib.nullcontext():
        if form == "json":
            click.echo(to_json(checks))
        else:
            print_checks(console(color), checks)
    if exit_code and any(check.status == "problem" for check in checks):
        return 1
    return 0


def known_variables(ctx: click.Context) -> frozenset[str]:
    """Return the name of every OOMGUARD_ variable that an option of some command reads."""
    names: set[str] = set()
    queue = [ctx.find_root().command]
    while queue:
        entry = queue.pop()
        for parameter in entry.params:
            variable = parameter.envvar
            names |= {variable} if isinstance(variable, str) else set(variable or ())
        if isinstance(entry, click.Group):
            queue += [
                child
                for name in entry.list_commands(ctx)
                if (child := entry.get_command(ctx, name))
            ]
    return frozenset(names)
