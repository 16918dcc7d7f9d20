"""Run ``oomguard contribute``: turn a measured start into a record that may be contributed."""

from __future__ import annotations

from pathlib import Path

import click

from oomguard.cli.options import GroupedCommand, option
from oomguard.core.errors import UsageError


@click.command(
    "contribute",
    cls=GroupedCommand,
    common=("model", "output"),
    example="oomguard contribute start.log --output starts.jsonl",
)
@click.argument("log", metavar="LOG")
@option(
    "--model",
    metavar="MODEL",
    help="Model folder or config.json of the start.",
    show_default="the model that the log names",
    example="./model",
)
@option(
    "--output",
    "-o",
    metavar="FILE",
    help="Append the record to FILE.",
    show_default="standard output",
    example="starts.jsonl",
)
def command(log: str, model: str | None, output: str | None) -> int:
    """Write the figures of a vLLM start as one line of JSON, without names, paths and hosts.

    LOG is a start-up log at logging level INFO. The record contains the version of vLLM, the size
    of the GPU, the numbers of the model's configuration, vLLM's flags and the printed figures. The
    constants of oomguard's plans are fitted to such records. oomguard sends nothing: read the
    record first, and share it if you like.

    Exit status: 0 after success. 2 after a usage error, or if the log has no figures or names
    another model.
    """
    from oomguard.planning.contribution import contribution
    from oomguard.report.json import json_line

    line = json_line(contribution(log, model))
    if output is None or output == "-":
        click.echo(line)
        return 0
    try:
        # Append, because one file collects the records of several starts.
        with Path(output).open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--output {output}: {reason}", hint="name a file in a folder that exists"
        ) from None
    return 0
