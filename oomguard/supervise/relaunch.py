"""The attempts of ``oomguard run``: run, diagnose, plan, patch, run again, until it fits or nothing is left."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from oomguard.diagnosing import assess_all
from oomguard.engines import vllm
from oomguard.engines.command import Launch, is_vllm_command
from oomguard.facts import FactValue
from oomguard.incident import Attempt, Diagnosis, Effect, Evidence, Incident, Patch, SettingInForce
from oomguard.journal import Journal, Record
from oomguard.log import get_logger
from oomguard.observe.host import Cgroup, killed_for_memory, read_cgroup
from oomguard.observe.scan import Scanner
from oomguard.remedy.planner import next_patches
from oomguard.remedy.policy import Policy
from oomguard.report.headline import headline
from oomguard.report.json import incident_dict, patch_dict
from oomguard.report.mask import mask_command
from oomguard.rules.load import RuleSet
from oomguard.supervise.memory_wait import free_by_device, wait_until_free
from oomguard.supervise.process import DEFAULT_GRACE_S, run_once
from oomguard.supervise.signals import Signals

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

# A failure last printed longer ago than this before the end did not end the run: a server that recovered an hour ago
# and dies of something else is not run again for it.
RECENT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the whole run ended: the last exit status, every attempt, and the last diagnosis that found anything."""

    status: int
    attempts: tuple[Attempt, ...]
    diagnosis: Diagnosis | None


@dataclass(slots=True)
class Supervision:
    """What the attempts of one ``oomguard run`` share; ``run`` makes them."""

    launch: Launch
    policy: Policy
    rules: RuleSet
    journal: Journal | None = None
    dry_run: bool = False
    grace_s: float = DEFAULT_GRACE_S
    on_failure: Callable[[Diagnosis, dict[str, str]], None] = lambda _diagnosis, _commands: None
    _first: Launch = field(init=False)
    _began_s: float = field(init=False, default_factory=time.monotonic)
    _session: str = field(init=False, default_factory=lambda: uuid.uuid4().hex)
    _settings: dict[str, FactValue] = field(init=False, default_factory=dict)
    _pending: tuple[Patch, ...] = field(init=False, default=())
    _tried: set[tuple[str, FactValue]] = field(init=False, default_factory=set)
    _attempts: list[Attempt] = field(init=False, default_factory=list)
    _diagnosis: Diagnosis | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._first = self.launch

    def run(self, signals: Signals) -> Outcome:
        """Run the command, and again after each patch; raises LaunchError where it cannot be started at all."""
        import tenacity

        stop: tenacity.stop.stop_base = tenacity.stop_after_attempt(1 + self.policy.max_relaunches)
        if self.policy.deadline_s is not None:
            stop = stop | tenacity.stop_after_delay(self.policy.deadline_s)
        with _session_folder() as folder:
            retrying = tenacity.Retrying(
                stop=stop,
                wait=tenacity.wait_none(),
                retry=tenacity.retry_if_result(lambda _attempt: bool(self._pending)),
                before_sleep=lambda _state: self._apply(folder),
                retry_error_callback=self._give_up,
            )
            last: Attempt = retrying(lambda: self._attempt(signals, folder))
        status = last.exit_status if last.exit_status is not None else 125
        if signals.stopped_between_runs and signals.stopped_by is not None:
            status = 128 + signals.stopped_by
        return Outcome(status, tuple(self._attempts), self._diagnosis)

    def _attempt(self, signals: Signals, folder: Path) -> Attempt:
        log, number, patches = get_logger(), len(self._attempts) + 1, self._pending
        self._pending = ()
        log.info("attempt started", number=number, command=self._shown())
        row = self._begin(number, patches)
        free_before = free_by_device()
        scanner, cgroup = Scanner(self.rules), read_cgroup()
        ended = run_once(self.launch, scanner, signals, grace_s=self.grace_s)
        diagnosis = self._diagnose(scanner, ended.status, cgroup)
        incident = diagnosis.first_cause
        attempt = Attempt(
            number, dict(self._settings), patches, incident, ended.status, "" if ended.status == 0 else f"exit status {ended.status}",
            ended.seconds, _comparable(scanner.measured, patches),
        )  # fmt: skip
        self._attempts.append(attempt)
        self._end(row, attempt)
        if signals.stopped_by is None:
            self._learn(scanner)
        log.info("attempt ended", number=number, exit_status=ended.status, seconds=round(ended.seconds, 1))
        if incident is not None:
            self._diagnosis = diagnosis
            self._after_failure(diagnosis, incident, signals, folder)
            if self._pending and self._may_run_again():
                held = wait_until_free(free_before, lambda: signals.stopped_by is not None)
                if held:
                    log.warning("memory is still held after the failed attempt", held=held)
            if signals.stopped_by is not None:
                self._pending = ()
        return attempt

    def _may_run_again(self) -> bool:
        """Whether the policy leaves an attempt: relaunches and time."""
        spent = time.monotonic() - self._began_s
        in_time = self.policy.deadline_s is None or spent < self.policy.deadline_s
        return in_time and len(self._attempts) <= self.policy.max_relaunches

    def _diagnose(self, scanner: Scanner, status: int, cgroup: Cgroup | None) -> Diagnosis:
        if status == 0:
            scanner.flush()
            return Diagnosis("")
        settings = vllm.settings_in_force(self.launch)
        # What an earlier patch set is in force; whose choice the setting was stays as the first launch and the log say.
        scanned = scanner.diagnosis("", given=settings, newer_than_s=time.monotonic() - RECENT_S)
        if not any(i.is_oom for i in scanned.incidents) and killed_for_memory(status, cgroup, read_cgroup()):
            scanned = replace(scanned, incidents=(*scanned.incidents, _killed_by_kernel(status)))
        if self._settings:
            scanned = replace(scanned, incidents=tuple(self._with_patched(i) for i in scanned.incidents))
        return assess_all(scanned, self.rules, self.policy, self._tried, local_models=True)

    def _learn(self, scanner: Scanner) -> None:
        """Keep what the engine measured while it started, for the plans to come; where that cannot be, the run goes on."""
        if self.journal is None or "kv_cache_available_bytes" not in scanner.measured:
            return
        try:
            from oomguard.memory.calibration import Calibrations, keep_measured, measured_start  # the memory model

            start = measured_start(scanner.diagnosis("", given=vllm.settings_in_force(self.launch)).starts)
            kept = keep_measured(start, f"oomguard run on {time.strftime('%Y-%m-%d')}", Calibrations())
            get_logger().debug("what the start measured", kept=kept)
        except Exception as error:  # noqa: BLE001 - whatever a log or a folder holds, the command's own end is not ours to change
            get_logger().debug("what the start measured is not kept", reason=str(error))

    def _with_patched(self, incident: Incident) -> Incident:
        first = vllm.settings_in_force(self._first)
        settings = dict(incident.settings)
        for name, value in self._settings.items():
            chosen, echoed = first.get(name), settings.get(name)
            if chosen is not None:
                by_user = chosen.set_by_user
            else:  # a flag that only the changed command has is ours
                by_user = echoed.set_by_user if echoed is not None and echoed.source != "command" else False
            settings[name] = SettingInForce(name, value, by_user, "patched")
        return replace(incident, settings=settings)

    def _after_failure(self, diagnosis: Diagnosis, incident: Incident, signals: Signals, folder: Path) -> None:
        log = get_logger()
        log.warning(
            "out of memory" if incident.is_oom else "failed",
            kind=incident.kind,
            what=headline(incident),
            cause=incident.causes[0].id,
        )
        if self._settings and not is_vllm_command(self.launch.argv) and not vllm.acknowledged(folder):
            log.warning("the change did not reach the engine: no vLLM in the command's Python took it")
        patches = next_patches(incident, vllm.carries) if incident.is_oom else ()
        self.on_failure(diagnosis, self._commands(incident))
        if not patches:
            log.info("nothing more to change by itself")
        elif self.dry_run:
            log.info(
                "dry run: nothing is run again",
                would_change=", ".join(f"{p.setting} {p.old} -> {p.new}" for p in patches),
            )
        elif signals.stopped_by is None:
            self._pending = patches

    def _commands(self, incident: Incident) -> dict[str, str]:
        """The full command with each solved patch and alternative applied, to paste; secrets are masked."""
        first = Launch(tuple(mask_command(self._first.argv)))
        solved = {patch.setting: patch.new for patch in incident.plan}
        solved |= {f"alternative:{other.setting}": other.new for other in incident.alternatives}
        groups = {
            patch.setting: {p.setting: p.new for p in incident.plan if p.group == patch.group and p.new is not None}
            for patch in incident.plan
            if patch.group is not None
        }
        commands = {}
        for key, value in solved.items():
            name = key.removeprefix("alternative:")
            if value is not None and vllm.carries(name):
                together = groups.get(key, {})
                commands[key] = vllm.shown(first, {**self._settings, **together, name: value})
        return commands

    def _shown(self) -> str:
        """The attempt as a line a person can read and paste; what only this run needs is left out."""
        return vllm.shown(Launch(tuple(mask_command(self._first.argv))), self._settings)

    def _apply(self, folder: Path) -> None:
        for patch in self._pending:
            assert patch.new is not None  # noqa: S101 - only applicable patches become pending
            self._settings[patch.setting] = patch.new
            self._tried.add((patch.setting, patch.new))
        self.launch = vllm.apply(self._first, self._settings, folder)
        log = get_logger()
        changed = {patch.setting: f"{patch.old} -> {patch.new}" for patch in self._pending}
        log.info("running again", **changed)
        if any(patch.effect >= Effect.REDUCES_CAPACITY for patch in self._pending):
            log.warning("this run goes on with reduced settings", **{p.setting: p.new for p in self._pending})

    def _give_up(self, _state: tenacity.RetryCallState) -> Attempt:
        get_logger().warning(
            "no relaunch is left", attempts=len(self._attempts), max_relaunches=self.policy.max_relaunches
        )
        return self._attempts[-1]

    def _begin(self, number: int, patches: tuple[Patch, ...]) -> int | None:
        predicted = {name: value for patch in patches for name, value in patch.predicts.items()}
        command = mask_command(self.launch.argv)
        dicts = [patch_dict(patch) for patch in patches]
        return self._keep(
            lambda kept: kept.begin(Record(self._session, number, command, self._settings, dicts, predicted=predicted))
        )

    def _end(self, row: int | None, attempt: Attempt) -> None:
        incident = incident_dict(attempt.incident) if attempt.incident else None
        if row is not None:
            status = attempt.exit_status if attempt.exit_status is not None else 125
            self._keep(lambda kept: kept.end(row, exit_status=status, incident=incident, measured=attempt.measured))

    def _keep(self, write: Callable[[Journal], T]) -> T | None:
        """Write to the journal; where that fails the run goes on without it, and says so once."""
        if self.journal is None:
            return None
        try:
            return write(self.journal)
        except (sqlite3.Error, OSError) as error:
            get_logger().warning("the journal is left out", path=str(self.journal.path), error=str(error))
            self.journal = None
            return None


def _comparable(measured: dict[str, float], patches: tuple[Patch, ...]) -> dict[str, float]:
    """Of what a run printed, the figures that a prediction can be held against, and the KV cache's."""
    wanted = {name for patch in patches for name in patch.predicts} | {
        "kv_cache_available_bytes",
        "kv_cache_capacity_tokens",
    }
    return {name: value for name, value in measured.items() if name in wanted}


@contextlib.contextmanager
def _session_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="oomguard-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _killed_by_kernel(status: int) -> Incident:
    """SIGKILL says nothing by itself; with the cgroup's own count it is the kernel's kill for memory."""
    text = f"the kernel ended the command for memory: exit status {status}, and its cgroup counts one oom_kill more"
    return Incident("host_oom", text, framework="host", evidence=(Evidence(text),))
