"""``oomguard report``: a measured start as a record that may be contributed."""

from __future__ import annotations

from pathlib import Path

import click

from oomguard.cli.options import option
from oomguard.core.errors import UsageError


@click.command("report")
@click.argument("log", metavar="LOG")
@option(
    "--model",
    metavar="MODEL",
    help="The model's folder or config.json. [default: what the log names]",
)
@option(
    "--output", "-o", metavar="FILE", help="Append the record to a file. [default: standard output]"
)
def command(log: str, model: str | None, output: str | None) -> int:
    """Write what a start of vLLM measured, as one line of JSON without names, paths and hosts.

    LOG is a start-up log at logging level INFO. The record has the version, the GPU's size, the
    model's numbers, vLLM's flags and the printed figures; constants of plans are fitted on such
    records. Nothing is sent: read it, and contribute it if you like.

    Exit status: 0 ran, 2 bad usage, a log that measured nothing, or one of another model.
    """
    from oomguard.planning.contribution import contribution
    from oomguard.report.json import json_line

    line = json_line(contribution(log, model))
    if output is None or output == "-":
        click.echo(line)
        return 0
    try:
        with Path(output).open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--output {output}: {reason}", hint="name a file in a folder that exists"
        ) from None
    return 0
