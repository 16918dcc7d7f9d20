"""Add the ``run`` options that choose, lease and wait for devices."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import click

from oomguard.cli.options import Duration, F, add_options, option, words_before_dashes
from oomguard.core.errors import UsageError

DEVICES: Final = "Devices"

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import DeviceAssignment


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Hold the placement options; without ``--gpus`` oomguard does not choose devices."""

    gpus: str | None
    wait_s: float | None
    lease: Literal["start", "job"]
    lease_folder: str | None
    own: tuple[str, ...] = ()

    def device_assignment(
        self, argv: Sequence[str], pinned: Sequence[str], outer_pid: int | None
    ) -> DeviceAssignment:
        """Return the device assignment for the attempts of a run.

        Raises:
            UsageError: an option is invalid or needs ``--gpus``.
        """
        if self.gpus is None:
            if self.wait_s is not None:
                raise UsageError(
                    "--wait needs --gpus",
                    hint="oomguard run --gpus auto --wait 30m -- …",
                )
            from oomguard.analyst.attempt_hooks import NoPlacement

            return NoPlacement()
        from oomguard.analyst.attempt_settings import DEVICE
        from oomguard.cluster.placement.leases import LeaseFolder
        from oomguard.cluster.placement.need import read_gpus
        from oomguard.cluster.placement.placer import Placer
        from oomguard.cluster.placement.refusal import Invocation
        from oomguard.cluster.placement.run_on_devices import RunPlacement
        from oomguard.core.redact import mask_command

        folder = LeaseFolder(
            None if self.lease_folder is None else Path(self.lease_folder).absolute()
        )
        command, own = (tuple(mask_command(words, keep_homes=True)) for words in (argv, self.own))
        asked = read_gpus(self.gpus)
        invocation = Invocation(asked.shown, shlex.join(command), own)
        placer = Placer(asked, folder, dict(os.environ), invocation, self.lease, outer_pid)
        return RunPlacement(placer, self.lease, self.wait_s, DEVICE in pinned)


def _folder_named(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise UsageError(
            "--lease-folder '': the name is empty",
            hint="leave out --lease-folder to use /tmp/oomguard-leases",
        )
    return value


def lease_folder_option(function: F) -> F:
    """Add the option --lease-folder."""
    return option(
        "--lease-folder",
        type=click.Path(file_okay=False),
        callback=_folder_named,
        metavar="DIR",
        help="Folder of device leases, which all users must share.",
        show_default="/tmp/oomguard-leases",  # noqa: S108 - only shown
        group=DEVICES,
        example="/var/lib/oomguard",
    )(function)


def placement_options(function: F) -> F:
    """Add --gpus, --wait, --lease and --lease-folder; the command gets them as ``placement``."""

    @functools.wraps(function)
    def with_placement(
        *args: Any,
        gpus: str | None,
        wait: float | None,
        lease: Literal["start", "job"],
        lease_folder: str | None,
        **kwargs: Any,
    ) -> Any:
        source = click.get_current_context().get_parameter_source("wait")
        if gpus is None and source is click.core.ParameterSource.DEFAULT_MAP:
            wait = None  # a configuration file applies to runs with and without --gpus
        return function(
            *args,
            placement=PlacementOptions(gpus, wait, lease, lease_folder, words_before_dashes()),
            **kwargs,
        )

    return add_options(
        cast("F", with_placement),
        (
            option(
                "--gpus",
                metavar="auto|N|LIST",
                help=(
                    "Choose the devices before the start: as many as the command needs, N of "
                    "them, or a list (0,1 or UUIDs)."
                ),
                show_default="the devices that the command sees",
                group=DEVICES,
                example="auto",
            ),
            option(
                "--wait",
                type=Duration(),
                metavar="TIME",
                help="Wait at most this long for a busy device (needs --gpus).",
                show_default="do not wait",
                group=DEVICES,
                example="30m",
            ),
            option(
                "--lease",
                type=click.Choice(["start", "job"]),
                default="start",
                show_default=True,
                help=(
                    "Reserve the devices until the engine has taken its memory, or until the job "
                    "ends (needs --gpus)."
                ),
                group=DEVICES,
            ),
            lease_folder_option,
        ),
    )
