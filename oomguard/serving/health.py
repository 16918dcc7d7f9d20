"""Health that sees a hang: looks at a server while it runs, says what is wrong, and ends it where that is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from oomguard.engines.command import Launch
from oomguard.engines.listening import Address, address_of
from oomguard.engines.serving import ServingNames, serving_names
from oomguard.incident import Attempt
from oomguard.log import get_logger
from oomguard.supervise.ended_by_us import EndedByUs
from oomguard.supervise.nesting import innermost
from oomguard.supervisor import tree

# A run of seconds never looks at its health: what does is loaded in its own thread.
if TYPE_CHECKING:
    from oomguard.serving.asking import Server
    from oomguard.serving.progress import Finding

_FIRST_LOOK_S: Final = 1.0


@dataclass(slots=True)
class Health:
    """Goes along with a run of an engine's server, as its companion.

    Attributes:
        engine: the engine's name.
        limit_s: a request that waits for so long while nothing moves is a hang.
        end: ends the command's processes; called from a thread.
        acts: end a server that hangs; else say it and go on. One whose engine is gone is ended in any case.
        asked_for: whether the user asked to watch, so that it is told where that cannot be done.
        environ: variables of the command.
        is_stopped: whether the user asked to stop: then its end is none of ours.
        is_ready: whether the server has answered in the attempt under way.
        wrong: what is wrong with it now; None: nothing that is known.
        had_cores: whether the engine's core was there when the server answered: it may die before the first look.
    """

    engine: str
    limit_s: float
    end: Callable[[threading.Event], None]
    environ: dict[str, str]
    acts: bool = False
    asked_for: bool = False
    is_stopped: Callable[[], bool] = lambda: False
    is_ready: bool = False
    wrong: str | None = None
    had_cores: bool = False
    _ended: EndedByUs | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _told: set[str] = field(default_factory=set)

    def began(self, _number: int, launch: Launch, pid: int | None) -> None:
        """Begin to look at the server of an attempt."""
        self.is_ready, self.wrong, self._ended = False, None, None
        argv = innermost(launch.argv)
        names, address = serving_names(self.engine), address_of(argv, self.engine)
        if names is None or pid is None:
            return
        if address is None:
            self.cannot_see("its address is not known from its command", hint="give --host and --port")
            self.is_ready = True  # nobody can tell; who waits for it would wait for ever
            return
        self._over = threading.Event()
        given = (argv, pid, address, names, self._over)
        threading.Thread(target=self._watch, args=given, name="oomguard-health", daemon=True).start()

    def ended(self, _attempt: Attempt) -> None:
        """Stop looking: the attempt has ended."""
        self._over.set()  # its thread may wait for an answer: nothing waits for it

    def ended_by_us(self) -> EndedByUs | None:
        """Return why we ended the last attempt; None where it ended by itself."""
        self._over.set()
        return self._ended

    def _watch(
        self, argv: tuple[str, ...], pid: int, address: Address, names: ServingNames, over: threading.Event
    ) -> None:
        if over.wait(_FIRST_LOOK_S):
            return
        from oomguard.serving.asking import Server
        from oomguard.serving.looking import LookedAt

        try:
            server = Server(address, names.speaks_tls(argv), names.key(argv, self.environ))
            if self._answers(server, names, pid, over) and self.limit_s > 0:
                LookedAt(self, server, names, pid, over, names.counts_nothing(argv)).watch()
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever a server answers
            self.cannot_see(f"{type(error).__name__}: {error}")

    def _answers(self, server: Server, names: ServingNames, pid: int, over: threading.Event) -> bool:
        """Wait until the server answers; return False where the attempt ended before, or another server answers."""
        from oomguard.serving.asking import ANSWER_S, NOBODY, OK, Answer

        is_ours = False
        while True:
            answer = server.ask(names.http["health"], limit_s=ANSWER_S)
            if answer != NOBODY and not is_ours:  # whatever it says: another server need not know the question
                listening = self._listening(server.address, pid)
                if listening is False:
                    return False
                is_ours = listening is True
            if isinstance(answer, Answer) and answer.status == OK:
                break
            if not isinstance(answer, Answer) and "SSL" in answer:
                self.cannot_see("it is not to be asked over TLS", reason=answer)
            if over.wait(_FIRST_LOOK_S):
                return False
        from oomguard.serving.engine_processes import engine_processes

        self.had_cores = bool(engine_processes(pid, dict(names.processes)).cores)
        self.is_ready = True
        get_logger().debug("the server answers", address=str(server.address))
        return True

    def _listening(self, address: Address, pid: int) -> bool | None:
        """Return whether the command listens at its address; False where another does instead, which is told; None: not known."""
        from oomguard.supervise.listeners import listening_at

        found = {bound: pids for bound, pids in listening_at(address).items() if pids}
        pids = {one for each in found.values() for one in each}
        if not pids or pids & {pid, *tree.descendants(pid)}:
            return True if pids else None
        told = ", ".join(sorted(map(str, found)))
        self.cannot_see("another server answers at its address", address=told, pids=sorted(pids))
        return False

    def cannot_see(self, why: str, **told: object) -> None:
        """Say, once, that something of the server is not watched."""
        if why not in self._told:
            self._told.add(why)
            log = get_logger()
            tell = log.warning if self.asked_for or "pids" in told else log.debug
            tell(f"a hang of the server may not be seen: {why}", **told)

    def found(self, finding: Finding, over: threading.Event) -> bool:
        """Tell what was found; return whether the server was ended for it."""
        log = get_logger()
        why = f"{'the engine is gone' if finding.is_dead else 'the server hangs'}: {finding.what}"
        acts = self.acts or finding.is_dead
        if over.is_set() or self.is_stopped():
            return True
        if self.wrong is None:
            log.warning(why) if acts else log.warning(why, to_end_it="give --restart on-failure")
        self.wrong = why
        if acts:
            self._ended = EndedByUs(why, is_hang=not finding.is_dead)
            self.end(over)
        return acts

    def goes_on(self) -> None:
        """Note that the server works, and say so where it was told otherwise; one that is being stopped moves for that."""
        if self.wrong is not None and not self.is_stopped():
            get_logger().info("the server goes on", after=self.wrong)
            self.wrong = None
