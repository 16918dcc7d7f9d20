"""What the tests of Ray tell of: one local cluster, everything done on it once, and told as JSON. Run by ``test_on_ray.py``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

import oomguard

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.25 GiB of which 2.11 MiB is free."
sizes: list[int] = []


def squares(numbers: list[int]) -> list[tuple[int, int, list[int]]]:
    """Return each number squared, with the process and the sizes that it was asked for; more than three run out of memory."""
    sizes.append(len(numbers))
    if len(numbers) > 3:
        raise RuntimeError(OOM)
    return [(number**2, os.getpid(), list(sizes)) for number in numbers]


def answer(task: Any, rows: int = 10) -> dict[str, Any]:
    found = ray.get(task.remote(list(range(rows))))
    return {"squares": [row[0] for row in found], "process": found[-1][1], "sizes": found[-1][2]}


def failure(call: Callable[[], Any]) -> dict[str, Any]:
    """Return what a failing call raises here, under a guard, and what is made of it."""
    guard = oomguard.guard()
    try:
        with guard:
            ray.get(call(), timeout=90)
    except Exception as error:  # noqa: BLE001 - told, whatever it is
        diagnosis = oomguard.diagnose(error)
        guarded = guard.diagnosis.first_cause if guard.diagnosis is not None else None
        return {
            "type": type(error).__name__,
            "kinds": [incident.kind for incident in diagnosis.incidents],
            "facts": {
                name: fact.value
                for incident in diagnosis.incidents
                for name, fact in incident.facts.items()
            },
            "guard": None if guarded is None else guarded.kind,
            "notes": list(getattr(error, "__notes__", [])),
        }
    return {}


def tasks() -> dict[str, Any]:
    below = ray.remote(max_calls=1)(oomguard.guard(batch="numbers")(squares))
    above = oomguard.guard(batch="numbers")(ray.remote(num_cpus=1, max_retries=0)(squares))
    return {
        "below": answer(below),
        "below again": answer(below),
        "above": answer(above),
        "above, with options": answer(above.options(num_cpus=0)),
        "is remote": type(above).__name__,
        "its options": {name: above._default_options[name] for name in ("num_cpus", "max_retries")},
    }


@ray.remote
class Below:
    @oomguard.guard(batch="numbers")
    def squares(self, numbers: list[int]) -> list[Any]:
        return squares(numbers)

    @oomguard.guard
    async def later(self) -> None:
        raise RuntimeError(OOM)

    @oomguard.guard
    def stream(self) -> Any:
        yield 1
        yield 2


@oomguard.guard(batch="numbers")
@ray.remote(num_cpus=0)
class Above:
    """An actor of the user's."""

    def __init__(self, most: int) -> None:
        self.most = most

    def squares(self, numbers: list[int]) -> list[Any]:
        return squares(numbers)

    async def how_many(self) -> int:
        return self.most

    def fails(self) -> None:
        raise RuntimeError(OOM)


@oomguard.guard
@ray.remote
class FailsToStart:
    def __init__(self) -> None:
        raise RuntimeError(OOM)

    def ready(self) -> None:
        pass


def actors() -> dict[str, Any]:
    below, above = Below.remote(), Above.remote(7)
    return {
        "below": answer(below.squares),
        "above": answer(above.squares),
        "async": ray.get(above.how_many.remote()),
        "stream": [
            ray.get(item) for item in below.stream.options(num_returns="streaming").remote()
        ],
        "method fails": failure(above.fails.remote),
        "async method fails": failure(below.later.remote),
        "start fails": failure(FailsToStart.remote().ready.remote),
    }


@ray.remote(max_retries=0)
def raises_from() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        raise RuntimeError(OOM) from error


@ray.remote(max_retries=0)
def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@ray.remote
class Killed:
    def work(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@ray.remote(max_retries=0)
def wrong() -> None:
    raise KeyError("CUDA out of memory is what the prompt said")


def failures() -> dict[str, Any]:
    return {
        "raised": failure(raises_from.remote),
        "killed": failure(killed.remote),
        "actor killed": failure(Killed.remote().work.remote),
        "something else": failure(wrong.remote),
    }


@ray.remote
def seen() -> dict[str, Any]:
    from importlib.metadata import entry_points

    shipped = [
        path for path in sys.path if "runtime_resources" in path and Path(path, "oomguard").is_dir()
    ]
    return {
        "overrides": os.environ.get("OOMGUARD_VLLM_OVERRIDES"),
        "own": os.environ.get("MINE"),
        "plugins": [
            entry.value
            for entry in entry_points(group="vllm.general_plugins")
            if entry.name == "oomguard"
        ],
        "shipped": len(shipped),
    }


def until_killed(most_bytes: int = 6 << 30) -> None:
    """Take memory a little at a time, and wait for the monitor; one that does not come lets the task go on."""
    taken = []
    while len(taken) << 20 < most_bytes:
        taken.append(bytes(range(256)) * 4096)
    time.sleep(20)


def heavy(numbers: list[int]) -> list[tuple[int, int, list[int]]]:
    sizes.append(len(numbers))
    if len(numbers) > 6:
        until_killed()
    return [(number**2, os.getpid(), list(sizes)) for number in numbers]


def whole(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        until_killed()
    return "ran"


def retried(folder: Path) -> dict[str, Any]:
    """Return what tasks do that the memory monitor killed once; it permits 2 GiB more than is in use now."""
    memory = psutil.virtual_memory()
    share = (memory.total - memory.available + (2 << 30)) / memory.total
    start({"memory_usage_threshold": share, "memory_monitor_refresh_ms": 100})
    try:
        split = ray.remote(max_calls=1)(oomguard.guard(batch="numbers")(heavy))
        floored = ray.remote(max_calls=1)(
            oomguard.guard(batch="numbers", floors={"batch_size": 5})(heavy)
        )
        told = {"split": answer(split), "split again": answer(split), "floored": answer(floored)}
        told["whole"] = ray.get(ray.remote(oomguard.guard(whole)).remote(folder / "mark"))
        told["monitor"] = failure(ray.remote(max_retries=0)(until_killed).remote)
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        said = [
            line for path in logs.glob("worker-*.err") for line in path.read_text().splitlines()
        ]
        return {**told, "said": [line for line in said if line.startswith("oomguard: ")]}
    finally:
        ray.shutdown()


def start(system: dict[str, Any] | None = None, **options: Any) -> None:
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _system_config=system, **options
    )  # fmt: skip


def main() -> None:
    start(
        runtime_env=oomguard.ray_runtime_env(
            {"max_model_len": 1024}, base={"env_vars": {"MINE": "kept"}}
        )
    )
    try:
        told = {
            "tasks": tasks(),
            "actors": actors(),
            "failures": failures(),
            "job's environment": ray.get(seen.remote()),
        }
        of_task = oomguard.ray_runtime_env({"max_model_len": 2048}, ship=False)
        told["task's environment"] = ray.get(seen.options(runtime_env=of_task).remote())
    finally:
        ray.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        told["retried"] = retried(Path(folder))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
