"""Looking at a server that answers: its counters, its connections, its processes, and a request of one token where these leave it open."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oomguard.engines.serving import ServingNames
from oomguard.log import get_logger
from oomguard.serving.asking import ANSWER_S, OK, Answer, Server
from oomguard.serving.connections import unanswered_s
from oomguard.serving.counters import Counters, read_counters
from oomguard.serving.engine_processes import engine_processes
from oomguard.serving.progress import Finding, Look, Progress
from oomguard.supervisor import tree

if TYPE_CHECKING:
    from oomguard.serving.health import Health

_SERVER_ERROR: Final = 500


def looks_every_s(limit_s: float) -> float:
    """Return how often a server is looked at: a twentieth of the limit, between 0.25 and 15 s."""
    return min(15.0, max(0.25, limit_s / 20))


def answer_limit_s(limit_s: float) -> float:
    """Return how long a request of one token may take that decides over a hang: a quarter of the limit, between 2 and 30 s."""
    return min(30.0, max(2.0, limit_s / 4))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The front answered and the engine was not asked: ``why`` says what came instead."""

    why: str


@dataclass(slots=True)
class LookedAt:
    """One server that answers, and how it is looked at."""

    health: Health
    server: Server
    names: ServingNames
    pid: int
    over: threading.Event
    counts_nothing: bool
    _model: str | None = None

    def watch(self) -> None:
        """Look until the attempt ends, or the server is ended for what was found."""
        limit_s = self.health.limit_s
        every_s = looks_every_s(limit_s)
        progress = Progress(limit_s, every_s, had_cores=self.health.had_cores)
        progress.see(self._look())
        while not self.over.wait(every_s):
            finding = progress.see(self._look())
            if finding is None:
                self.health.goes_on()
            elif self._holds(finding, progress) and self.health.found(finding, self.over):
                return

    def _look(self) -> Look:
        began_s = time.monotonic()
        answer = self.server.ask(self.names.metrics["path"], limit_s=min(ANSWER_S, self.health.limit_s))
        engines: dict[str, Counters] | None = None
        if isinstance(answer, Answer):
            engines = read_counters(answer.text, self.names.metrics) if answer.status == OK else {}
            if not engines:
                self._tell_uncounted(answer)
        waits_s = unanswered_s(self.server.address.port) if self.server.address.path is None else None
        processes = engine_processes(self.pid, dict(self.names.processes))
        return Look(began_s, time.monotonic(), engines, waits_s, processes, tree.is_stopped(self.pid))

    def _tell_uncounted(self, answer: Answer) -> None:
        path = self.names.metrics["path"]
        if self.counts_nothing:
            why = f"{self.names.metrics['off_flags'][0]} leaves {path} without the engine's counters"
        elif answer.status == OK:
            why = f"{path} has no counters of this engine"
        else:
            why = f"{path} answers {answer.status}"
        left = (
            "the time that requests wait, and the CPU time of its processes"
            if self.server.address.path is None
            else "nothing"
        )
        self.health.cannot_see(why, left=left)

    def _holds(self, finding: Finding, progress: Progress) -> bool:
        """Return whether the finding stands: nothing else explains it, or a request through the engine gets no answer."""
        if finding.is_sure or self.health.wrong is not None or not finding.may_be_asked:
            return True
        answers: list[Answer | Elsewhere | str] = []
        limit_s = answer_limit_s(self.health.limit_s) if finding.has_counters else self.health.limit_s
        asking = threading.Thread(
            target=lambda: answers.append(self._asked(limit_s)), name="oomguard-asks", daemon=True
        )
        asking.start()
        moved = False
        while asking.is_alive() and not moved:
            if self.over.wait(looks_every_s(limit_s)):
                return False
            moved = progress.see(self._look()) is None
        answer = answers[0] if answers else "no answer"
        if moved or (isinstance(answer, Answer) and answer.status == OK):
            get_logger().debug("the engine goes on", though=finding.what)
            progress.forget(time.monotonic())
            return False
        if isinstance(answer, Elsewhere):
            self.health.cannot_see("it takes no request that tells", reason=answer.why)
            return finding.is_counted
        if isinstance(answer, Answer) and answer.status < _SERVER_ERROR:  # the front's own word
            self.health.cannot_see("it takes no request that tells", status=answer.status)
            return finding.is_counted
        return True

    def _asked(self, limit_s: float) -> Answer | Elsewhere | str:
        """Ask for one token; whatever a server answers, and whatever goes wrong with that, is an answer."""
        try:
            return self._ask(limit_s)
        except Exception as error:  # noqa: BLE001 - a thread of our own: what it raises would stand on the command's standard error
            return Elsewhere(f"{type(error).__name__}: {error}")

    def _ask(self, limit_s: float) -> Answer | Elsewhere | str:
        if self._model is None:
            path = self.names.http["models"]
            told = self.server.ask(path, limit_s=ANSWER_S)
            if not isinstance(told, Answer) or told.status != OK:
                return told
            self._model = _first_model(told.text)
            if self._model is None:
                return Elsewhere(f"{path} names no model")
        path, body = self.names.http["ask"], {"model": self._model, **self.names.http["body"]}
        answer = self.server.ask(path, limit_s=limit_s, body=body)
        if isinstance(answer, Answer) and answer.status == OK and not isinstance(_parsed(answer.text), dict):
            return Elsewhere(f"{path} answers something else than an engine does")
        return answer


def _first_model(text: str) -> str | None:
    """Return the first model of a list as OpenAI's API has it; None where the text is none."""
    match _parsed(text):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    return None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
