"""The options of ``oomguard run`` for a server that runs for weeks, and what they put beside the
run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from oomguard.cli.options import Duration, decorated, option
from oomguard.core.errors import OomguardError, UsageError, exit_status_of

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import Companion
    from oomguard.analyst.link import ReceivedSignals
    from oomguard.analyst.outcome import EndedByUs, Outcome
    from oomguard.cluster.serving.health import Health
    from oomguard.cluster.serving.systemd import SystemdNotifier
    from oomguard.engines.command import Launch

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_HANG_AFTER_S: Final = 300.0
# Restarts of weeks are bounded by the hour: the user did not bound the whole.
NO_BOUND: Final = 10**9
# The server's own time to end after a hang; what hangs seldom takes it.
END_S: Final = 10.0


def serving_options(function: F) -> F:
    """Add --restart, --hang-after and --termination-message."""
    return decorated(
        function,
        (
            option(
                "--restart",
                type=click.Choice(["no", "on-failure"]),
                default="no",
                show_default=True,
                help="on-failure: run the command again as it was where it failed of something "
                "else than memory, a hang too; "
                "--max-per-hour bounds it, --max-relaunches only where you give it.",
            ),
            option(
                "--hang-after",
                type=Duration(),
                default=DEFAULT_HANG_AFTER_S,
                show_default=True,
                metavar="TIME",
                help="A server whose requests wait for so long while its engine takes no step "
                "hangs: it is told, and ended with "
                "--restart on-failure, also where no start is left. 0: do not look.",
            ),
            option(
                "--termination-message",
                type=click.Path(dir_okay=False),
                metavar="PATH",
                help=(
                    "Where a failed run leaves how it ended, at most 4096 bytes. [default: "
                    "/dev/termination-log in a pod of Kubernetes]"
                ),
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What was asked for."""

    restart: str
    hang_after: float
    termination_message: str | None

    def checked(self, *, is_inside: bool) -> ServingOptions:
        """Return what this run does of it: inside another run that one looks and runs again.

        Raises:
            UsageError: a place cannot be written.
        """
        place = self.termination_message
        if place is not None and not os.access(Path(place).absolute().parent, os.W_OK):
            raise UsageError(
                f"--termination-message {place}: the folder cannot be written",
                hint="name a folder that exists",
            )
        if is_inside:
            return replace(self, restart="no", hang_after=0.0)
        return self

    def is_asked_for(self, ctx: click.Context) -> bool:
        """Return whether the user asked to have the server watched."""
        given = ctx.get_parameter_source("hang_after") is not click.core.ParameterSource.DEFAULT
        return self.hang_after > 0 and (given or self.restarts)

    @property
    def restarts(self) -> bool:
        """Whether the command is run again as it was."""
        return self.restart == "on-failure"

    def relaunches(self, ctx: click.Context, given: int) -> int:
        """Return the relaunches in all: those that were given, else without a bound where restarts
        are asked for.
        """
        is_default = (
            ctx.get_parameter_source("max_relaunches") is click.core.ParameterSource.DEFAULT
        )
        if self.restarts and is_default:
            return NO_BOUND
        return given


class BesideServer:
    """What goes along with the run of a server; nothing where the command is none.

    Args:
        options: what was asked for.
        launch: the command.
        signals: of the run.
        grace_s: time that the command has to end.
        asked: whether the user gave an option of these.
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
        self._told: SystemdNotifier | None = None
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
                self._told = SystemdNotifier(systemd, self._health, end.is_stopped)
                signals.on_stop = self._told.stopping

    @property
    def companions(self) -> tuple[Companion, ...]:
        """What hears of each attempt."""
        return tuple(companion for companion in (self._health, self._told) if companion is not None)

    def ended_by_us(self) -> EndedByUs | None:
        """Return why we ended the last attempt; None where it ended by itself."""
        if self._health is None:
            return None
        return self._health.ended_by_us()

    @property
    def health(self) -> Health | None:
        """What looks at the server; None where the command is none."""
        return self._health

    def tell(self, outcome: Outcome) -> None:
        """Tell how the run ended, to all that were asked to hear."""
        if self._told is not None:
            self._told.close(outcome.status)
        from oomguard.cluster.serving.end_message import message_of

        if not outcome.attempts[-1].succeeded:
            self._leave(partial(message_of, outcome))

    @contextlib.contextmanager
    def telling_errors(self, also: Callable[[str], None]) -> Iterator[None]:
        """Tell of a run that ends before its command could start, as of one that failed; the error
        goes on.

        Args:
            also: who else is told, in the words of the message.
        """
        try:
            yield
        except OomguardError as error:
            if self._told is not None:
                self._told.close(exit_status_of(error))
            from oomguard.cluster.serving.end_message import message_of_error

            self._leave(partial(message_of_error, error))
            also(message_of_error(error))
            raise

    def _leave(self, message: Callable[[], str]) -> None:
        """Leave how the run ended where that is asked for."""
        from oomguard.cluster.serving.end_message import leave_message, message_place

        place = message_place(self._options.termination_message, os.environ)
        if place is not None:
            leave_message(place, message())
