"""Add the options of ``oomguard run`` for a server that runs for weeks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from oomguard.cli.options import Duration, add_options, option
from oomguard.core.errors import OomguardError, UsageError, exit_status_of

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import AttemptHook
    from oomguard.analyst.link import ReceivedSignals
    from oomguard.analyst.outcome import Outcome, TerminationReason
    from oomguard.cluster.serving.health import Health
    from oomguard.cluster.serving.systemd import SystemdNotifier
    from oomguard.engines.command import Launch

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_HANG_AFTER_S: Final = 300.0
# The limit per hour bounds restarts over weeks; the user set no total limit.
NO_BOUND: Final = 10**9
# Time for a hanging server to end; it rarely uses it.
END_S: Final = 10.0


def serving_options(function: F) -> F:
    """Add the options --restart, --hang-after and --termination-message."""
    return add_options(
        function,
        (
            option(
                "--restart",
                type=click.Choice(["no", "on-failure"]),
                default="no",
                show_default=True,
                help="on-failure: also rerun the command unchanged after a failure or hang that "
                "is not an out-of-memory. --max-per-hour limits it; --max-relaunches only if you "
                "give it.",
            ),
            option(
                "--hang-after",
                type=Duration(),
                default=DEFAULT_HANG_AFTER_S,
                show_default=True,
                metavar="TIME",
                help="Treat the server as hung if requests wait this long without engine "
                "progress. Reports it; with --restart on-failure also stops it. 0 disables.",
            ),
            option(
                "--termination-message",
                type=click.Path(dir_okay=False),
                metavar="PATH",
                help=(
                    "File for the outcome of a failed run, at most 4096 bytes. [default: "
                    "/dev/termination-log in a pod of Kubernetes]"
                ),
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Hold the serving options."""

    restart: str
    hang_after: float
    termination_message: str | None

    def checked(self, *, is_inside: bool) -> ServingOptions:
        """Return the options that this run follows; an outer run restarts and detects hangs itself.

        Raises:
            UsageError: if the termination message cannot be written.
        """
        place = self.termination_message
        if place is not None and not os.access(Path(place).absolute().parent, os.W_OK):
            raise UsageError(
                f"--termination-message {place}: oomguard cannot write to this folder",
                hint="name a folder that exists",
            )
        if is_inside:
            return replace(self, restart="no", hang_after=0.0)
        return self

    def is_asked_for(self, ctx: click.Context) -> bool:
        """Return whether the user asked to watch the server."""
        given = ctx.get_parameter_source("hang_after") is not click.core.ParameterSource.DEFAULT
        return self.hang_after > 0 and (given or self.restarts)

    @property
    def restarts(self) -> bool:
        """Whether the command is rerun unchanged after a failure."""
        return self.restart == "on-failure"

    def relaunches(self, ctx: click.Context, given: int) -> int:
        """Return the total number of relaunches; unlimited for restarts without a given number."""
        is_default = (
            ctx.get_parameter_source("max_relaunches") is click.core.ParameterSource.DEFAULT
        )
        if self.restarts and is_default:
            return NO_BOUND
        return given


class ServerContext:
    """Connect a run to the health checks of its server; idle if the command is not a server.

    Args:
        options: the serving options.
        launch: the command.
        signals: the signals of the run.
        grace_s: the time that the command has to end, in seconds.
        asked: whether the user gave one of these options.
    """

    def __init__(
        self,
        options: ServingOptions,
        launch: Launch,
        signals: ReceivedSignals,
        grace_s: float,
        *,
        asked: bool,
    ) -> None:
        self._options = options
        self._health: Health | None = None
        self._notifier: SystemdNotifier | None = None
        from oomguard.engines.registry import launcher_of
        from oomguard.engines.side_effects import is_server

        if not is_server(launch):
            return
        from oomguard.analyst.outcome import CommandTerminator
        from oomguard.cluster.serving.health import Health

        end = CommandTerminator(signals, min(grace_s, END_S))
        name = launcher_of(launch).NAME
        self._health = Health(
            name, options.hang_after, end, dict(os.environ), options.restarts, asked, end.is_stopped
        )
        if "NOTIFY_SOCKET" in os.environ:
            from oomguard.cluster.serving.systemd import SystemdNotifier, taken_from

            systemd = taken_from(os.environ)
            if systemd is not None:
                self._notifier = SystemdNotifier(systemd, self._health, end.is_stopped)
                signals.on_stop = self._notifier.stopping

    @property
    def companions(self) -> tuple[AttemptHook, ...]:
        """The listeners of each attempt."""
        return tuple(
            companion for companion in (self._health, self._notifier) if companion is not None
        )

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard stopped the last attempt; None if it ended on its own."""
        if self._health is None:
            return None
        return self._health.ended_by_us()

    @property
    def health(self) -> Health | None:
        """The health of the server; None if the command is not a server."""
        return self._health

    def report(self, outcome: Outcome) -> None:
        """Report the end of the run to systemd and in the termination message."""
        if self._notifier is not None:
            self._notifier.close(outcome.status)
        from oomguard.cluster.serving.end_message import message_of

        if not outcome.attempts[-1].succeeded:
            self._leave(partial(message_of, outcome))

    @contextlib.contextmanager
    def reporting_errors(self, also: Callable[[str], None]) -> Iterator[None]:
        """Report an error before the command's start like a failed run, and raise it again.

        Args:
            also: receives the same message.
        """
        try:
            yield
        except OomguardError as error:
            if self._notifier is not None:
                self._notifier.close(exit_status_of(error))
            from oomguard.cluster.serving.end_message import message_of_error

            self._leave(partial(message_of_error, error))
            also(message_of_error(error))
            raise

    def _leave(self, message: Callable[[], str]) -> None:
        """Write the termination message if the user or Kubernetes asks for it."""
        from oomguard.cluster.serving.end_message import leave_message, message_place

        place = message_place(self._options.termination_message, os.environ)
        if place is not None:
            leave_message(place, message())
