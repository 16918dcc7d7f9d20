"""The ledger of one remedied run: what was tried, what came of it, and what the next attempt
changes.

A guarded call, a loop over ``oomguard.attempts`` and a command under ``oomguard run`` go the same
way: an attempt begins with the patches chosen after the last one, ends with what was seen, and
leads to the next patches, until it succeeds, nothing is left to change, or the policy leaves no
attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import DeadlineError
from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.kinds import CURABLE_KINDS
from oomguard.remedy.policy import Policy

if TYPE_CHECKING:
    from oomguard.remedy.from_estimate import FailureModel
    from oomguard.rules.rule_files import RuleSet


# What explains a failure is loaded when there is one: a run that succeeds starts at once.


DEVICE: Final = "device"


class Ledger:
    """The attempts of one run under one policy.

    Attributes:
        settings: the settings that may be changed, with their values in the attempt under way.
        patches: what is new in the attempt under way.
        pending: the patches of the next attempt; empty where none follows.
        attempts: the attempts that ended, in order.
        tried: every (setting, value) that failed; none is chosen again.
        diagnosis: the last one that found an incident, else the first.
        exhausted: whether patches were left when the policy's relaunches or its time were not.
        left: these patches.
        is_change_left: whether all ranks permit a change though no attempt follows; None: no ranks
            have agreed on that.
    """

    def __init__(self, policy: Policy, settings: Mapping[str, FactValue] | None = None) -> None:
        self.policy = policy
        self.settings: dict[str, FactValue] = dict(settings or {})
        self.patches: tuple[Patch, ...] = ()
        self.pending: tuple[Patch, ...] = ()
        self.attempts: list[Attempt] = []
        self.tried: set[tuple[str, FactValue]] = set()
        self.diagnosis: Diagnosis | None = None
        self.exhausted = False
        self.left: tuple[Patch, ...] = ()
        self.is_change_left: bool | None = None
        self._is_stopped = False
        self._repeats = False
        self._before = 0
        self._began_s = self._attempt_began_s = time.monotonic()

    def reopen(self, *, anew: bool) -> Attempt:
        """Take the last attempt back, which ended well and has failed since, and return it.

        ``anew``: relaunches and time count from here, as it did what it was for. What failed before
        is not tried again.
        """
        taken = self.attempts.pop()
        self.patches = taken.patches
        self.pending = ()
        if anew:
            self._before = len(self.attempts)
            self._began_s = time.monotonic()
            self.exhausted = False
        return taken

    def rounds(self) -> Iterator[int]:
        """Begin one attempt after another and yield its number.

        The loop ends when ``choose`` leaves no patches, ``repeat`` was not called, or the policy
        permits no further attempt.
        """
        yield self._begin()
        while self._leads_on and self.leaves_another():
            yield self._begin()
        self.exhausted = self.exhausted or self._leads_on

    @property
    def _leads_on(self) -> bool:
        return bool(self.pending) or self._repeats

    def _begin(self) -> int:
        self.patches = self.pending
        self.pending = ()
        self._repeats = False
        for patch in self.patches:
            assert patch.new is not None  # noqa: S101 - only applicable patches are chosen
            self.settings[patch.setting] = patch.new
        self._attempt_began_s = time.monotonic()
        return len(self.attempts) + 1

    def forget(self, names: Iterable[str]) -> None:
        """Drop settings that are not changed any more."""
        for name in names:
            del self.settings[name]

    def diagnose(
        self,
        scanned: Diagnosis,
        rules: RuleSet,
        *,
        failed_with: Mapping[str, FactValue] | None = None,
        given: Mapping[str, Fact] | None = None,
        local_models: bool = False,
        behind: FailureModel | None = None,
    ) -> Diagnosis:
        """Explain a failed attempt and plan for it; nothing it failed with is planned again.

        Args:
            scanned: what the attempt's output or exception says.
            rules: the rules that explain it.
            failed_with: the values in force when it failed; None: ``settings``.
            given: facts that fill what was not printed.
            local_models: whether the memory model may read a model folder that the output names.
            behind: the model behind the failure, where the caller has it.
        """
        from oomguard.diagnosis.diagnose import assess_all

        self.tried.update((self.settings if failed_with is None else failed_with).items())
        found = assess_all(
            scanned,
            rules,
            self.policy,
            self.tried,
            given=given,
            local_models=local_models,
            behind=behind,
        )
        if found.incidents or self.diagnosis is None:
            self.diagnosis = found
        return found

    def end(
        self,
        incident: Incident | None = None,
        *,
        error: str = "",
        exit_status: int | None = None,
        seconds: float | None = None,
        measured: Mapping[str, float] | None = None,
        ranks: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """End the attempt under way with what was seen of it; ``seconds`` None: since it began;
        ``ranks`` as ``Attempt`` has them.
        """
        if seconds is None:
            took_s = time.monotonic() - self._attempt_began_s
        else:
            took_s = seconds
        number = len(self.attempts) + 1
        settings = dict(self.settings)
        attempt = Attempt(
            number,
            settings,
            self.patches,
            incident,
            exit_status,
            error,
            took_s,
            measured or {},
            ranks,
        )
        self.attempts.append(attempt)
        return attempt

    def wanted(self, incident: Incident, carries: Callable[[str], bool]) -> tuple[Patch, ...]:
        """Return the patches that the plan offers and ``carries`` accepts by setting, none of which
        has failed.
        """
        from oomguard.remedy.planner import next_patches

        # No setting cures what is no shortage, such as a neighbour that freed memory while the
        # engine profiled: another device may.
        moves = any(patch.setting == DEVICE and patch.applicable for patch in incident.plan)
        if moves or incident.kind in CURABLE_KINDS:
            return next_patches(incident, carries, self.tried)
        return ()

    def choose(self, incident: Incident, carries: Callable[[str], bool]) -> tuple[Patch, ...]:
        """Choose the patches of the next attempt, after the last one has ended.

        Empty after a stop, where nothing is left to change, and where the policy leaves no attempt
        (``exhausted``).
        """
        wanted = () if self._is_stopped else self.wanted(incident, carries)
        self.exhausted = bool(wanted) and not self.leaves_another()
        self.pending, self.left = ((), wanted) if self.exhausted else (wanted, ())
        return self.pending

    def follow(
        self, patches: tuple[Patch, ...], left: tuple[Patch, ...], *, is_change_left: bool
    ) -> None:
        """Take what all ranks agreed on for the next attempt, in place of ``choose``."""
        self.tried.update(self.settings.items())
        self.pending = patches
        self.left = left
        self.is_change_left = is_change_left

    def repeat(self) -> bool:
        """Have the last attempt made again as it was; return whether there is another one, as after
        ``choose``.
        """
        self.exhausted = not self._is_stopped and not self.leaves_another()
        self._repeats = not self._is_stopped and not self.exhausted
        return self._repeats

    def refuse(self, why: str | None) -> None:
        """Drop the patches chosen for another attempt, which is not to be made; the diagnosis says
        why.
        """
        self.pending = ()
        if self.diagnosis is not None and why is not None:
            self.diagnosis = replace(self.diagnosis, notes=(*self.diagnosis.notes, why))

    def stop(self) -> None:
        """Choose nothing from here on, and drop what was chosen: the user's stop is a stop."""
        self._is_stopped = True
        self._repeats = False
        self.pending = ()

    def time_left_s(self) -> float:
        """Return the seconds until the policy's deadline: infinite without one, none or fewer after
        it.
        """
        if self.policy.deadline_s is None:
            limit_s = math.inf
        else:
            limit_s = self.policy.deadline_s
        return limit_s - (time.monotonic() - self._began_s)

    def require_time(self) -> None:
        """Raise DeadlineError where the deadline has passed."""
        if self.time_left_s() <= 0:
            raise DeadlineError(
                f"the deadline of {self.policy.deadline_s:g} s came before the attempt could begin"
            )

    def leaves_another(self) -> bool:
        """Return whether the policy leaves another attempt: relaunches and time."""
        return (
            self.time_left_s() > 0
            and len(self.attempts) - self._before <= self.policy.max_relaunches
        )
