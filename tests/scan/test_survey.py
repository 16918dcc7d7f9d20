"""Who each GPU is, how it is divided and what is wrong with it: the real nvidia-ml-py over a C library that changes while it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.placing import Gpus, simulated_gpus

GIB = 2**30
ASK = """
import dataclasses, json, sys
from oomguard.probe.nvml import survey
for _ in sys.stdin:
    print(json.dumps(dataclasses.asdict(survey())), flush=True)
"""


def ask(gpus: Gpus) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input="\n",
        env={**os.environ, **gpus.env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_each_gpu_tells_its_uuid_and_who_holds_what_of_it(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(1): 3 * GIB})
    found = ask(gpus)

    assert [gpu["uuid"] for gpu in found["gpus"]] == [simulated_gpus.uuid(i) for i in range(4)]
    assert found["gpus"][1]["device"]["used_bytes_by_pid"] == {str(os.getpid()): 3 * GIB}
    assert found["gpus"][1]["device"]["free_bytes"] == 21 * GIB
    assert (found["failure"], found["driver"]) == (None, "580.65.06")


def test_divided_gpu_shows_its_instances_by_their_numbers(gpus):
    gpus.are(
        simulated_gpus.line(0, 80, "H100", "mig"),
        f"mig MIG-a {10 * GIB} 0 H100_MIG_1g.10gb",
        f"mig MIG-c {20 * GIB} 2 H100_MIG_2g.20gb",
        simulated_gpus.line(1),
    )
    first, second = ask(gpus)["gpus"]

    assert first["is_divided"]
    assert [(one["number"], one["uuid"], one["total_bytes"]) for one in first["instances"]] == [
        (0, "MIG-a", 10 * GIB),
        (2, "MIG-c", 20 * GIB),
    ]
    assert (second["is_divided"], second["instances"]) == (False, [])


def test_a_gpu_that_fell_off_keeps_its_place_and_says_why(gpus):
    gpus.are(simulated_gpus.line(0), simulated_gpus.line(1, more="lost"), simulated_gpus.line(2))
    found = ask(gpus)["gpus"]

    assert [gpu["failure"] for gpu in found] == [None, "GPU is lost", None]
    assert found[1]["device"]["total_bytes"] is None


def test_a_driver_that_does_not_match_its_library_is_the_answer(gpus):
    gpus.are("fails init 18")
    assert "version mismatch" in ask(gpus)["failure"]


def test_no_permission_is_the_answer_and_not_no_gpu(gpus):
    gpus.are("fails count 4", simulated_gpus.line(0))
    found = ask(gpus)
    assert (found["failure"], found["gpus"]) == ("Insufficient Permissions", [])


def test_what_changes_meanwhile_is_seen_by_the_next_look(gpus):
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **gpus.env},
        text=True,
    ) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None

        def look() -> list[bool]:
            asking.stdin.write("\n")
            asking.stdin.flush()
            return [gpu["is_divided"] for gpu in json.loads(asking.stdout.readline())["gpus"]]

        before = look()
        gpus.are(simulated_gpus.line(0, more="mig"))
        after = look()
        asking.stdin.close()

    assert (before, after) == ([False] * 4, [True])


def test_a_missing_library_is_told_with_what_is_missing():
    code = "from oomguard.probe.nvml import survey; print(survey().failure)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (
        "libnvidia-ml.so.1 was not found" in done.stdout or done.stdout.strip() == "None"
    )  # or a real driver is here
