"""Show the GPUs of this machine with ``oomguard gpus``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from oomguard.cli.command import GroupedCommand
from oomguard.cli.options import color_option, console_of, format_option
from oomguard.cluster.placement.options import lease_folder_option


@click.command(
    "gpus",
    cls=GroupedCommand,
    common=("form", "lease_folder"),
    example="oomguard gpus --format json",
)
@format_option("the devices")
@lease_folder_option
@color_option
def command(form: str, lease_folder: str | None, color: str) -> int:
    """Show each GPU: memory, processes, MIG instances, leases, and what this user cannot see.

    Exit status: 0, even if NVML does not answer; the output then shows the reason.
    """
    from oomguard.cluster.placement.gpus_report import gpus_record, inspect_devices, print_gpus
    from oomguard.cluster.placement.leases import LeaseFolder
    from oomguard.report.json import json_line

    found = inspect_devices(
        LeaseFolder(None if lease_folder is None else Path(lease_folder).absolute(), makes=False),
        dict(os.environ),
    )
    if form == "json":
        click.echo(json_line(gpus_record(found)))
    else:
        print_gpus(console_of(form, color), found)
    return 0
