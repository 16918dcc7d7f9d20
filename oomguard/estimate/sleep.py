"""Say who has the memory of an engine that sleeps, wakes up, or slept next to a trainer.

Sleep mode returns an engine's device memory and takes it again. The log's lines become facts about
who has the memory, and sentences for the rules.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from oomguard.core.facts import GIB, Fact, FactValue, format_gib, format_rounded, number_of
from oomguard.core.incident import Incident

# Ray actors that contain a trainer, and the program that they belong to.
_TRAINERS: Final = {
    "WorkerDict": "verl",
    "ActorRollout": "verl",
    "AsyncActorRollout": "verl",
    "ActorModel": "OpenRLHF",
    "PolicyModel": "OpenRLHF",
    "CriticModel": "OpenRLHF",
    "MegatronTrain": "slime",
    "FSDPTrain": "slime",
    "DTensorPolicy": "NeMo-RL",
    "MegatronPolicy": "NeMo-RL",
    "PolicyWorker": "NeMo-RL",
    "TrainRayActor": "",
}
_ROLLOUTS: Final = {"LLMRayActor": "OpenRLHF", "VllmGenerationWorker": "NeMo-RL"}
_ENGINE_NAME: Final = re.compile(r"(?i)vllm|enginecore|sglang|trt.?llm|lmdeploy")
_PID: Final = re.compile(r"\bpid=(\d+)")
_LISTED: Final = re.compile(r"\bProcess (\d+) has ([\d.]+) (GiB|MiB)")
# One process of nvidia-smi: a row of its table, or a line of comma-separated values.
_TABLE_ROW: Final = re.compile(r"(\d{2,})\s+[CGM+]{1,4}\s+(\S.*?)\s+(\d+) ?MiB")
_CSV_ROW: Final = re.compile(r"(?<![\w.-])(\d{2,})\s*,(?:\s*([^,\n]*?)\s*,)?\s*(\d+) MiB")
_MIB: Final = 1 << 20
# Below this a process has only its own context and libraries on the device.
_LEAST_HOLDER_BYTES: Final = 3 * GIB
_KEPT_RATIO: Final = 0.15
_UNKNOWN: Final = "The log does not show how much memory the engine freed when it went to sleep."


class _Process(NamedTuple):
    pid: int
    name: str
    size_bytes: int


def with_sleep(facts: dict[str, Fact], incident: Incident, phase: str) -> str:
    """Add the log's sleep facts and return the phase.

    The phase is ``wake_up`` if the sleep mode's allocator failed after the engine slept: the
    allocator maps memory only at the start and when it wakes up.
    """
    _add_framework(facts, incident)
    if _framework(facts) and not _is(facts, "asleep"):
        _solve(facts, "rollout_awake", True)
    level = number_of(facts, "sleep_level") or 1
    if "sleep_used_bytes" in facts and level == 1:
        _solve(facts, "sleeps_on_host", True)
    about_sleep = facts.keys() & {
        "asleep",
        "sleep_backup_frames",
        "gathered_frames",
        "synced_frames",
        "rollout_awake",
    }
    # A trainer that prints its steps has long started its engine.
    runs = facts.keys() & {"asleep", "trainer_step", "trainer_finished_step"}
    if runs and _is(facts, "pool_allocator"):
        phase = "wake_up"
    if not about_sleep and phase != "wake_up":
        return phase
    if _is(facts, "sleep_backup_frames"):
        return "unknown"
    is_of_device = incident.kind in {"cuda_oom", "hip_oom", "npu_oom"}
    is_any_step = is_of_device and phase in {"unknown", "generate", "prefill", "decode"}
    sends = facts.keys() & {"gathered_frames", "synced_frames"}
    if is_any_step and _is(facts, "asleep") and _framework(facts) and not sends:
        phase = "training"  # the engine sleeps, so the step is the trainer's
    process = incident.location.process or ""
    if process.startswith(tuple(_TRAINERS)):
        _solve(facts, "trainer_frames", True)
        # Its own allocator waits for memory that the rollout engine still has.
        if incident.framework == "sglang" and _is(facts, "pool_allocator"):
            _solve(facts, "trainer_waits", "slime" in _framework(facts))
    _add_sleeper(facts, incident, phase)
    _add_holder(facts, incident, phase)
    text = " ".join(_sentences(facts, phase)) or _UNKNOWN
    used = facts.get("sleep_used_bytes")
    facts.setdefault(
        "sleep_account",
        Fact("sleep_account", text, "solved", line=None if used is None else used.line),
    )
    return phase


def _solve(facts: dict[str, Fact], name: str, value: FactValue) -> None:
    facts.setdefault(name, Fact(name, value, "solved"))


def _framework(facts: dict[str, Fact]) -> str:
    if "rl_framework" not in facts:
        return ""
    return str(facts["rl_framework"].value)


def _add_framework(facts: dict[str, Fact], incident: Incident) -> None:
    """Name the trainer's program by the Ray actors in the failure's lines."""
    if "rl_framework" in facts:
        return
    lines = "\n".join(line.text for line in incident.evidence)
    shown = f"{incident.location.process or ''}\n{lines}"
    for role, program in (*_TRAINERS.items(), *_ROLLOUTS.items()):
        if program and role in shown:
            _solve(facts, "rl_framework", program)
            return


def _own_pid(text: str) -> int | None:
    found = _PID.search(text)
    if found is None:
        return None
    return int(found[1])


def _add_sleeper(facts: dict[str, Fact], incident: Incident, phase: str) -> None:
    """Add the memory that a sleeping engine still has, if the log shows it.

    The allocator's message may list the sleeper by its PID. SGLang prints no sizes, so another
    process's memory counts as the sleeper's.
    """
    if not _is(facts, "asleep") or phase == "wake_up":
        return
    total = number_of(facts, "device_total_bytes") or math.inf
    kept: float | None = None
    if _is(facts, "sleep_kept_by_engine"):
        kept = number_of(facts, "sleep_used_bytes")
    elif incident.framework == "sglang":
        kept = number_of(facts, "other_process_in_use_bytes") or number_of(facts, "others_bytes")
    elif "sleep_process" in facts:
        pid = _own_pid(str(facts["sleep_process"].value))
        for one in _of_message(incident.message):
            if one.pid == pid:
                kept = one.size_bytes
    if kept is not None and kept > max(_KEPT_RATIO * total, _LEAST_HOLDER_BYTES):
        _solve(facts, "sleeper_bytes", round(kept))
        facts["sleep_kept_by_engine"] = Fact("sleep_kept_by_engine", True, "solved")
    elif kept is not None and total is not math.inf:
        facts["sleep_kept_by_engine"] = Fact("sleep_kept_by_engine", False, "solved")


def _of_message(message: str) -> list[_Process]:
    found = []
    for pid, size, unit in _LISTED.findall(message):
        scale = GIB
        if unit == "MiB":
            scale = _MIB
        found.append(_Process(int(pid), "", round(float(size) * scale)))
    return found


def _of_list(text: str) -> list[_Process]:
    found = []
    for line in text.splitlines():
        row = _TABLE_ROW.search(line) or _CSV_ROW.search(line)
        if row is not None:
            found.append(_Process(int(row[1]), row[2] or "", int(row[3]) * _MIB))
    return found


def _add_holder(facts: dict[str, Fact], incident: Incident, phase: str) -> None:
    """Name the process that has the memory: another program, the rollout engine or the trainer."""
    if "sleeper_bytes" in facts:
        return
    listed = facts.get("device_processes")
    if listed is not None:
        other = _other_of(_of_list(str(listed.value)), facts, incident)
        if other is not None:
            _name_holder(facts, other)
            return
    if _is(facts, "trainer_waits"):
        _solve(facts, "device_holder", "rollout")
        used = number_of(facts, "device_listed_used_bytes")
        if used is not None:
            _solve(facts, "device_holder_bytes", round(used))
        return
    if _is(facts, "trainer_frames") or "trainer_reserved_bytes" in facts or _framework(facts):
        _solve(facts, "device_holder", "trainer")
        reserved = number_of(facts, "trainer_reserved_bytes")
        if reserved is not None:
            _solve(facts, "device_holder_bytes", round(reserved))
        if phase == "wake_up":
            _solve(facts, "trainer_frames", True)


def _other_of(
    processes: list[_Process], facts: dict[str, Fact], incident: Incident
) -> _Process | None:
    """Return the largest listed process that is not the failed engine, or None."""
    slept = str(facts["sleep_process"].value) if "sleep_process" in facts else ""
    own = {_own_pid(incident.location.process or ""), _own_pid(slept)}
    engines = [one for one in processes if _ENGINE_NAME.search(one.name)]
    rest = [one for one in processes if one.pid not in own]
    if own == {None} and engines:  # no line shows the engine's own PID: the smallest one slept
        rest.remove(min(engines, key=lambda one: one.size_bytes))
    largest = max(rest, key=lambda one: one.size_bytes, default=None)
    if largest is None or largest.size_bytes < _LEAST_HOLDER_BYTES:
        return None
    return largest


def _name_holder(facts: dict[str, Fact], process: _Process) -> None:
    kind = "other"
    if _ENGINE_NAME.search(process.name):
        kind = "engine"
    actor = process.name.removeprefix("ray::")
    for role, program in _TRAINERS.items():
        if actor.startswith(role):
            kind = "trainer"
            _solve(facts, "trainer_frames", True)
            if program:
                _solve(facts, "rl_framework", program)
    name = f"PID {process.pid}"
    if process.name:
        name = f"{process.name} (PID {process.pid})"
    _solve(facts, "device_holder", kind)
    _solve(facts, "device_holder_name", name)
    _solve(facts, "device_holder_pid", process.pid)
    _solve(facts, "device_holder_bytes", process.size_bytes)


def _sentences(facts: dict[str, Fact], phase: str) -> list[str]:
    """Return sentences about the failed cycle, the freed, remaining and newly used memory."""
    sentences = [*_failed_cycle(facts, phase), *_holder(facts), *_first_residue(facts)]
    freed = facts.get("sleep_freed_bytes")
    used = facts.get("sleep_used_bytes")
    needed = facts.get("wake_needed_bytes") or freed
    each = facts.get("sleep_used_each")
    if freed is not None and used is not None:
        sentences.append(
            f"Its last sleep freed {_size(freed)}; {_size(used)} of the device stayed in use."
        )
    has_several = each is not None and " " in str(each.value)
    if has_several and not _is(facts, "residue_grows"):
        sentences.append(f"In use after each sleep: {facts['sleep_used_each'].value} GiB.")
    if needed is None or phase != "wake_up":
        return sentences
    if needed is not freed:
        sentences.append(f"It needs {_size(needed)} to wake up.")
    total = number_of(facts, "device_total_bytes")
    if total and used is not None:
        taken = round(total - float(needed.value) - float(used.value))
        if taken > 0:
            slack = needed.slack + used.slack
            sentences.append(
                f"So other allocations took at least {format_rounded(taken, slack)} while it slept."
            )
    return sentences


def _failed_cycle(facts: dict[str, Fact], phase: str) -> list[str]:
    """Return the sentence about the cycle in which the failure happened, if the log shows it."""
    cycle = number_of(facts, "sleep_cycles")
    step = number_of(facts, "trainer_step")
    finished = number_of(facts, "trainer_finished_step")
    if step is None and finished is not None:
        step = finished + 1
    where = ""
    if step is not None:
        where = f", in step {step:.0f}"
    if cycle is None:
        if step is None:
            return []
        return [f"It failed in step {step:.0f}."]
    if phase == "wake_up":
        return [f"It failed after sleep {cycle:.0f} of this log{where}."]
    if _is(facts, "asleep"):
        return [f"It failed during sleep {cycle:.0f} of this log{where}."]
    return [f"It failed after the engine woke up from sleep {cycle:.0f} of this log{where}."]


def _holder(facts: dict[str, Fact]) -> list[str]:
    """Return the sentence about the process that has the memory, if it has a size."""
    size = number_of(facts, "device_holder_bytes")
    if size is None:
        return []
    held = format_gib(size)
    kind = str(facts["device_holder"].value)
    if kind in {"engine", "other"}:  # the rule names it
        return []
    if kind == "rollout":
        return [f"{held} of the device was in use when the trainer wanted its memory back."]
    allocated = number_of(facts, "trainer_allocated_bytes")
    if allocated is None:
        return [f"The trainer had reserved {held}."]
    return [f"The trainer had reserved {held}, of which tensors used {format_gib(allocated)}."]


def _first_residue(facts: dict[str, Fact]) -> list[str]:
    """Return the sentence about the first sleep after which clearly more stayed in use, if any."""
    if _is(facts, "residue_grows"):
        return [f"More stays in use after each sleep: {facts['sleep_used_each'].value} GiB."]
    cycle = number_of(facts, "sleep_residue_cycle")
    used = number_of(facts, "sleep_residue_used_bytes")
    least = number_of(facts, "sleep_least_used_bytes")
    if cycle is None or used is None or least is None:
        return []
    instead = ""
    if used > least:
        instead = f" instead of {format_gib(least)}"
    stayed = f"{format_gib(used)} stayed in use{instead}"
    if _is(facts, "sleep_kept_by_engine"):
        return [
            f"Sleep {cycle:.0f} was the first that did not release the engine's memory: {stayed}."
        ]
    who = "another program"
    if "device_holder" in facts and facts["device_holder"].value == "trainer":
        who = "the trainer"
    return [f"Since sleep {cycle:.0f} {who} uses more: {stayed}."]


def _is(facts: dict[str, Fact], name: str) -> bool:
    return name in facts and facts[name].value is True


def _size(fact: Fact) -> str:
    return format_rounded(float(fact.value), fact.slack)
