"""Record the attempts of one run, choose what the next one changes, and wait for its memory.

A guarded call, a loop over ``oomguard.attempts`` and ``oomguard run`` work in the same way. Each
attempt applies the patches chosen after the last one, and its end leads to the next patches. The
run ends when an attempt succeeds, when nothing is left to change, or when the policy permits no
further attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import DeadlineError
from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import CURABLE_KINDS, Attempt, Diagnosis, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.probe import nvml
from oomguard.probe.nvml import Device
from oomguard.remedy.policy import Policy

if TYPE_CHECKING:
    from oomguard.remedy.solution import FailureModel
    from oomguard.rules.rule_files import RuleSet


# Modules that explain failures load only when there is one, so that a successful run starts fast.
DEVICE: Final = "device"


class Ledger:
    """Keep the attempts of one run under one policy.

        for number in ledger.rounds():
            attempt = ledger.end(incident, error="OutOfMemoryError")
            ledger.choose(incident, lambda setting: True)

    Attributes:
        settings: the settings that may change, with their values in the present attempt.
        patches: the patches of the present attempt.
        pending: the patches of the next attempt; empty if none follows.
        attempts: the attempts that ended, in order.
        tried: (setting, value) pairs that failed; none is chosen again.
        diagnosis: the last diagnosis with an incident, otherwise the first one.
        exhausted: whether patches were left, but no attempts or no time.
        left: these patches.
        is_change_left: whether all ranks permit a change though no attempt follows; None: the ranks
            have not agreed on that.
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
        """Take back the last attempt, which succeeded but has failed since, and return it.

        ``anew``: count attempts and time from now, because the attempt had done its work. What
        failed before is not tried again.
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
        # Changes were left, but the loop ended: only the policy forbids another attempt.
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
        """Drop settings that do not change any more."""
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
        memory_model: FailureModel | None = None,
    ) -> Diagnosis:
        """Diagnose a failed attempt and plan for it; nothing that failed is planned again.

        Args:
            scanned: the failures in the attempt's output or exception.
            rules: the rules that explain them.
            failed_with: the effective settings of the attempt; None: ``settings``.
            given: facts for what was not printed.
            local_models: whether the memory model may read a model folder that the output names.
            memory_model: the memory model behind the failure; None: none is known.
        """
        from oomguard.diagnosis import assess_all

        # Values that failed are recorded before planning, so that no plan contains one of them
        # again.
        self.tried.update((self.settings if failed_with is None else failed_with).items())
        found = assess_all(
            scanned,
            rules,
            self.policy,
            self.tried,
            given=given,
            local_models=local_models,
            memory_model=memory_model,
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
        """End the present attempt with its result.

        ``seconds`` None: the time since the attempt began. ``ranks`` as in ``Attempt``.
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
        """Return the plan's next patches that ``carries`` accepts and that have not failed."""
        # Loaded here, because a successful run plans nothing.
        from oomguard.remedy.planner import next_patches

        # Some kinds are not a shortage, such as another process that freed memory during profiling.
        # No setting helps then, but another device may.
        moves = any(patch.setting == DEVICE and patch.applicable for patch in incident.plan)
        if moves or incident.kind in CURABLE_KINDS:
            return next_patches(incident, carries, self.tried)
        return ()

    def choose(self, incident: Incident, carries: Callable[[str], bool]) -> tuple[Patch, ...]:
        """Choose the patches of the next attempt after the last one has ended.

        Empty after a stop, if nothing is left to change, or if the policy permits no further
        attempt (``exhausted``).
        """
        wanted: tuple[Patch, ...] = ()
        if not self._is_stopped:
            wanted = self.wanted(incident, carries)
        self.exhausted = bool(wanted) and not self.leaves_another()
        if self.exhausted:
            self.pending = ()
            self.left = wanted
        else:
            permission = self.policy.permission
            pending = [replace(patch, permitted_by=permission(patch)) for patch in wanted]
            self.pending = tuple(pending)
            self.left = ()
        return self.pending

    def follow(
        self, patches: tuple[Patch, ...], left: tuple[Patch, ...], *, is_change_left: bool
    ) -> None:
        """Use what all ranks agreed on for the next attempt, instead of ``choose``."""
        # The other ranks ran with these values too, so they count as tried.
        self.tried.update(self.settings.items())
        self.pending = patches
        self.left = left
        self.is_change_left = is_change_left

    def repeat(self) -> bool:
        """Repeat the last attempt unchanged; return whether the policy permits it."""
        self.exhausted = not self._is_stopped and not self.leaves_another()
        self._repeats = not self._is_stopped and not self.exhausted
        return self._repeats

    def refuse(self, why: str | None) -> None:
        """Drop the patches of the next attempt, which does not follow; the diagnosis notes why."""
        self.pending = ()
        if self.diagnosis is not None and why is not None:
            self.diagnosis = replace(self.diagnosis, notes=(*self.diagnosis.notes, why))

    def stop(self) -> None:
        """Choose nothing more, and drop what was chosen: the user stopped the run."""
        self._is_stopped = True
        self._repeats = False
        self.pending = ()

    def time_left_s(self) -> float:
        """Return the seconds until the deadline: infinite without one, negative after it."""
        if self.policy.deadline_s is None:
            limit_s = math.inf
        else:
            limit_s = self.policy.deadline_s
        return limit_s - (time.monotonic() - self._began_s)

    def require_time(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self.time_left_s() <= 0:
            raise DeadlineError(
                f"the deadline of {self.policy.deadline_s:g} s passed before the attempt began"
            )

    def leaves_another(self) -> bool:
        """Return whether the policy permits another attempt, by attempts and time."""
        return (
            self.time_left_s() > 0 and len(self.attempts) - self._before < self.policy.max_attempts
        )


FREE_LIMIT_S: Final = 60.0
FREE_POLL_S: Final = 0.5
# Drivers usually free memory within a second; a longer wait needs an explanation.
ANNOUNCE_AFTER_S: Final = 2.0
TOLERANCE_RATIO: Final = 0.01


def devices_by_index() -> dict[int, Device]:
    """Return the devices with known free memory, by index."""
    found = {}
    for device in nvml.devices() or ():
        if device.free_bytes is not None:
            found[device.index] = device
    return found


def wait_until_free(
    before: Mapping[int, Device],
    stop: Callable[[], bool],
    *,
    limit_s: float = FREE_LIMIT_S,
    host_pids: bool | None = None,
) -> str | None:
    """Wait until every device has its earlier free memory again, within 1%.

    Args:
        before: the devices before the attempt.
        stop: checked every ``FREE_POLL_S`` seconds; waiting ends once it returns true.
        limit_s: the longest wait in seconds.
        host_pids: whether process ids here are those that NVML shows; None: ask the kernel.

    Returns:
        What is still used after ``limit_s`` and by which processes, as text. None if all memory is
        free again, after a stop, or if nothing is known.
    """
    began = time.monotonic()
    deadline = began + limit_s
    # Drivers usually free memory within a second, so a short wait is not announced.
    is_announced = False
    while before and not stop():
        now = devices_by_index()
        held = {}
        for index, was in before.items():
            size = _held_bytes(was, now.get(index))
            if size is not None:
                held[index] = size
        if not held:
            return None
        if not is_announced and time.monotonic() - began > ANNOUNCE_AFTER_S:
            is_announced = True
            get_logger().info(
                "Waiting until the GPUs are as free as before the attempt",
                still_held=", ".join(f"GPU {i}: {format_gib(size)}" for i, size in held.items()),
                at_most_s=round(limit_s),
            )
        if time.monotonic() > deadline:
            from oomguard.probe.nvml import sees_host_pids

            if host_pids is None:
                is_host_pid = sees_host_pids()
            else:
                is_host_pid = host_pids
            lines = []
            for i, size in held.items():
                holders = _holders(before[i], now[i], is_host_pid=is_host_pid)
                lines.append(f"GPU {i}: {format_gib(size)} still held, {holders}")
            return "; ".join(lines)
        time.sleep(FREE_POLL_S)
    return None


def _held_bytes(was: Device, now: Device | None) -> int | None:
    """Return the bytes that are still in use; None if all are free, or if nothing is known."""
    if now is None or now.free_bytes is None or was.free_bytes is None:
        return None
    if now.free_bytes < was.free_bytes * (1 - TOLERANCE_RATIO):
        return was.free_bytes - now.free_bytes
    return None


def _holders(was: Device, now: Device, *, is_host_pid: bool | None) -> str:
    """Return the processes that use more of a device than before, largest first."""
    if now.used_bytes_by_pid is None:
        return "by processes that the driver does not show"
    before = was.used_bytes_by_pid or {}
    grown = {}
    for pid, size in now.used_bytes_by_pid.items():
        growth = (size or 0) - (before.get(pid) or 0)
        if growth > 0 or pid not in before:
            grown[pid] = (size, growth)
    if not grown:
        return "by no process that the driver shows"
    if not is_host_pid:
        if len(grown) > 1:
            return f"by {len(grown)} processes outside this container's view"
        return "by a process outside this container's view"
    from oomguard.core.presentable import process_list

    by_growth = sorted(grown, key=lambda pid: -grown[pid][1])
    return f"by {process_list(by_growth, lambda pid: _has(grown[pid][0]))}"


def _has(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return f" with {format_gib(size_bytes)}"
