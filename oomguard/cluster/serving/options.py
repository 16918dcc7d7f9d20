"""Add the ``run`` options for a server that runs for weeks."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from oomguard.analyst.attempt_hooks import AttemptHook
from oomguard.analyst.outcome import TerminationReason
from oomguard.cli.options import Duration, add_options, option
from oomguard.core.errors import OomguardError, UsageError, exit_status_of

if TYPE_CHECKING:
    from oomguard.analyst.link import ReceivedSignals
    from oomguard.analyst.outcome import Outcome
    from oomguard.cluster.serving.health import Health
    from oomguard.cluster.serving.systemd import SystemdNotifier
    from oomguard.engines.command import Launch

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_HANG_AFTER_S: Final = 300.0
SERVERS: Final = "Servers"
# A server that restarts for weeks has a limit per hour, but none in total by default.
NO_BOUND: Final = 10**9


def serving_options(function: F) -> F:
    """Add --restart, --hang-after and --termination-message; the command gets them as
    ``serving``.
    """

    @functools.wraps(function)
    def with_serving(
        *args: Any,
        restart: str,
        hang_after: float,
        termination_message: str | None,
        **kwargs: Any,
    ) -> Any:
        asked = ServingOptions(restart, hang_after, termination_message)
        return function(*args, serving=asked, **kwargs)

    return add_options(
        cast("F", with_serving),
        (
            option(
                "--restart",
                type=click.Choice(["no", "on-failure"]),
                default="no",
                show_default=True,
                help=(
                    "Restart the command unchanged after a hang or a failure that is not an "
                    "out-of-memory."
                ),
                group=SERVERS,
                example="on-failure",
            ),
            option(
                "--hang-after",
                type=Duration(),
                default=DEFAULT_HANG_AFTER_S,
                show_default=f"{DEFAULT_HANG_AFTER_S:.0f}s",
                metavar="TIME",
                help=(
                    "Report a hang if requests wait this long without engine progress (0 = never)."
                ),
                group=SERVERS,
                example="10m",
            ),
            option(
                "--termination-message",
                type=click.Path(dir_okay=False),
                metavar="PATH",
                help="File for the summary of a failed run, at most 4096 bytes.",
                show_default="/dev/termination-log in a Kubernetes pod",
                group=SERVERS,
                example="/dev/termination-log",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Hold the server options."""

    restart: str
    hang_after: float
    termination_message: str | None

    def checked(self, *, is_inside: bool) -> ServingOptions:
        """Return the options that apply to this run; an outer run watches and restarts instead.

        Raises:
            UsageError: the termination message cannot be written.
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
        """Whether the command restarts after a failure that is not an out-of-memory."""
        return self.restart == "on-failure"

    def attempts(self, ctx: click.Context, given: int) -> int:
        """Return the largest number of attempts: the user's, or no limit with restarts."""
        by_default = click.core.ParameterSource.DEFAULT
        names = ("max_attempts", "max_relaunches")
        is_default = all(ctx.get_parameter_source(name) is by_default for name in names)
        if self.restarts and is_default:
            return NO_BOUND
        return given


class ServerSupport:
    """Watch the server of a run; do nothing for another kind of command.

    Args:
        options: the server options.
        launch: the command.
        signals: the signals of the run.
        grace_s: the time that the command gets to end, in seconds.
        asked: whether the user asked to watch the server.
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
        from oomguard.engines.server import is_server

        if not is_server(launch):
            return
        from oomguard.analyst.outcome import END_S, CommandTerminator
        from oomguard.cluster.serving.health import Health

        end = CommandTerminator(signals, min(grace_s, END_S))
        name = launcher_of(launch).NAME
        self._health = Health(
            name, options.hang_after, end, dict(os.environ), options.restarts, asked, end.is_stopped
        )
        if "NOTIFY_SOCKET" in os.environ:
            from oomguard.cluster.serving.systemd import SystemdNotifier, take_systemd_socket

            systemd = take_systemd_socket(os.environ)
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
        """Return why oomguard ended the last attempt, or None."""
        if self._health is None:
            return None
        return self._health.ended_by_us()

    @property
    def health(self) -> Health | None:
        """The health monitor of the server, or None for another kind of command."""
        return self._health

    def report_end(self, outcome: Outcome) -> None:
        """Report the end of the run to systemd and in the termination message."""
        if self._notifier is not None:
            self._notifier.close(outcome.status)
        from oomguard.cluster.serving.end_message import message_of

        if not outcome.attempts[-1].succeeded:
            self._leave(partial(message_of, outcome))

    @contextlib.contextmanager
    def reporting_errors(self, also: Callable[[str], None]) -> Iterator[None]:
        """Report an error that ends the run before its command starts; the error is raised again.

        Args:
            also: another function that takes the message.
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
        """Write the termination message, if there is a path for it."""
        from oomguard.cluster.serving.end_message import leave_message, message_place

        place = message_place(self._options.termination_message, os.environ)
        if place is not None:
            leave_message(place, message())
