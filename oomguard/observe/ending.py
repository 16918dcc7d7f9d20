"""How an engine ended, as its own log tells: it died, its front found it gone, or it was told to stop.

A wording tells one of five:

- ``died``: the engine itself says so.
- ``failing``: it lost a part, at work or while starting, and does not tell what becomes of the whole.
- ``gone``: its front says so, also of an engine that ended with its program.
- ``stopping``: it stops in good order.
- ``told``: someone asked it to stop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oomguard.incident import Evidence, Incident, Location


@dataclass(slots=True)
class Ending:
    """How one start of an engine has ended so far; ``death`` is None as long as no line tells one.

    ``missed`` says that a serving front found the engine gone, ``told_line`` where it was asked to stop while it lived.
    """

    death: Incident | None = None
    missed: bool = False
    told_line: int | None = None
    _only_gone: bool = False
    _failing: bool = False
    _stopping: bool = False

    def note(self, what: str, evidence: Evidence, process: str | None, framework: str) -> None:
        """Take one line that tells of the end; a line after a stop belongs to the stop and tells no death.

        Args:
            what: one of the five.
            evidence: the line as it was printed.
            process: the process that printed it.
            framework: the engine.
        """
        if what == "told" and self._only_gone:
            self.death, self._only_gone = None, False  # a stop reaches engine and front at once: either may print first
        if what == "failing":
            self._failing = True
        # What is left of a failing engine stops in good order, which is no stop of the engine.
        if what == "told" or (what == "stopping" and not self._failing):
            self._stopping = self._stopping or self.death is None
        if what == "told" and self.death is None and self.told_line is None:
            self.told_line = evidence.line
        if what not in {"died", "gone"}:
            return
        self.missed = self.missed or (what == "gone" and not self._stopping)
        if not self._stopping and (self.death is None or (self._only_gone and what == "died")):
            location = Location(evidence.line, None, process)
            self.death = Incident("engine_dead", evidence.text, framework, location=location, evidence=(evidence,))
            self._only_gone = what == "gone"

    def was_told_before(self, line: int) -> bool:
        """Return whether it had been asked to stop before that line: what fails of its end then is no death."""
        return self.told_line is not None and self.told_line < line

    def of(self, start: int) -> Incident | None:
        """Return the death as an incident of this start, None if no line tells one."""
        return None if self.death is None else replace(self.death, start=start)
