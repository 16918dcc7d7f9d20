"""A run that is placed: on devices where its plan fits, one start at a time, moved where a neighbour is in the way."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time

import pytest

from oomguard.cluster.placement.leases import LeaseFolder
from oomguard.cluster.placement.placer import earlier_starts
from support.placing import Gpus, overlaps, serve, simulated_gpus, start
from support.supervising import wait_for

GIB = 2**30
PRINT = ["sh", "-c", "echo visible=$CUDA_VISIBLE_DEVICES order=$CUDA_DEVICE_ORDER"]


def run(
    gpus: Gpus, options: tuple[str, ...], command: list[str], **env: str
) -> tuple[int, str, str]:
    job = start(gpus, options, command, **env)
    out, errors = job.communicate(timeout=200)
    return job.returncode, out, errors


def used(gpus: Gpus) -> list[list[str]]:
    return [uuids for _, _, what, uuids in gpus.happened() if what == "ends"]


def holders(gpus: Gpus) -> list[str]:
    return list(
        LeaseFolder(gpus.folder / "leases", makes=False).holders(
            simulated_gpus.uuid(i) for i in range(4)
        )
    )


def test_a_script_gets_a_device_that_nobody_uses_and_is_told_why(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 2 * GIB})
    status, out, errors = run(gpus, ("--gpus", "auto"), PRINT)
    assert (status, out) == (0, "visible=1 order=PCI_BUS_ID\n")
    assert "memory need is unknown" in errors


@pytest.mark.parametrize(
    ("asked", "visible"),
    [(f"{simulated_gpus.uuid(3)},1", "3,1")],
    ids=["list"],
)
def test_a_number_or_a_list_decides_and_a_list_s_order_is_kept(gpus, asked, visible):
    _, out, errors = run(gpus, ("--gpus", asked), PRINT)
    assert out.split()[0] == f"visible={visible}", errors


def test_the_user_s_variable_is_a_limit(gpus):
    _, out, errors = run(gpus, ("--gpus", "auto"), PRINT, CUDA_VISIBLE_DEVICES="3,2")
    assert out.split()[0] in {"visible=2", "visible=3"}
    assert "hides GPU 0, GPU 1" in errors
    status, _, errors = run(gpus, ("--gpus", "0,"), PRINT, CUDA_VISIBLE_DEVICES="3,2")
    assert status == 2
    assert (
        "--gpus names 0, but the devices here are: GPU 3, GPU 2; CUDA_VISIBLE_DEVICES=3,2 hides GPU 0, GPU 1"
        in errors
    )


def test_impossible_start_is_refused_with_both_numbers(gpus):
    command = [word for word in serve(gpus) if word not in ("--max-model-len", "8192")]
    status, _, errors = run(gpus, ("--gpus", "auto", "--wait", "1h"), command)

    assert (status, gpus.happened()) == (125, [])
    assert re.search(
        r"it needs at least 3\d\.\d\d GiB of a device, but GPU 0, the largest, has 24\.00 GiB",
        errors,
    )
    assert re.search(
        r"oomguard run --gpus auto --wait 1h -- vllm serve \S+ --max-model-len \d+\n", errors
    )


def test_lease_lasts_until_the_engine_has_started(gpus):
    with start(
        gpus, ("--gpus", "auto"), serve(gpus), SIMULATED_START_S="1", SIMULATED_RUN_S="30"
    ) as job:
        assert wait_for(lambda: holders(gpus) == [simulated_gpus.uuid(0)])
        assert wait_for(lambda: any(what == "started" for _, _, what, _ in gpus.happened()))
        assert wait_for(lambda: holders(gpus) == [], 10)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        job.communicate()


def test_a_killed_holder_s_lease_is_free_within_a_second(gpus):
    with start(gpus, ("--gpus", "auto"), ["sleep", "60"]) as job:
        assert wait_for(lambda: bool(holders(gpus)))
        job.kill()
        began_s = time.monotonic()
        assert wait_for(lambda: not holders(gpus), 10)
        assert time.monotonic() - began_s < 1


def test_taken_device_is_named_with_its_holder_without_wait(gpus):
    gpus.are_alike(1)
    with start(gpus, ("--gpus", "auto"), ["sleep", "60"]) as job:
        assert wait_for(lambda: bool(holders(gpus)))
        status, out, errors = run(gpus, ("--gpus", "auto"), PRINT)
        assert (status, out) == (125, "")
        assert f"GPU 0: leased by pid {job.pid} (sleep 60) for" in errors
        assert f"oomguard run --gpus auto --wait 30m -- {shlex.join(PRINT)}\n" in errors
        job.send_signal(signal.SIGTERM)
        job.communicate()


def test_a_user_s_stop_ends_the_wait_and_nothing_is_started(gpus):
    gpus.are_alike(1)
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    with start(gpus, ("--gpus", "auto", "--wait", "1h"), PRINT) as job:
        assert wait_for(
            lambda: bool(list(earlier_starts(LeaseFolder(gpus.folder / "leases"), None)))
        )
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (128 + signal.SIGTERM, "")
    assert not list((gpus.folder / "leases").glob("turn-*"))


def test_simultaneous_starts_never_share_a_device(gpus):
    gpus.are_alike(2)
    options = ("--gpus", "auto", "--wait", "3m")
    jobs = [start(gpus, (*options, "--lease", "job"), serve(gpus)) for _ in range(4)]
    ended = [job.communicate(timeout=200)[1] for job in jobs]

    assert [job.returncode for job in jobs] == [0] * 4, ended
    assert overlaps(gpus, "ends") == []


def test_late_neighbour_is_avoided_by_another_device_first(
    gpus,
):
    status, _, errors = run(
        gpus,
        ("--gpus", "auto", "--allow", "reduces-capacity"),
        serve(gpus),
        SIMULATED_NEIGHBOUR=str(15 * GIB),
    )
    assert (status, used(gpus)) == (0, [[simulated_gpus.uuid(1)]]), errors
    assert (
        f'Running the command again: device="{simulated_gpus.uuid(0)} -> {simulated_gpus.uuid(1)}"'
        in errors
    )


def test_requested_wait_begins_without_another_device(gpus):
    gpus.are_alike(1)
    job = start(
        gpus, ("--gpus", "auto", "--wait", "2m"), serve(gpus), SIMULATED_NEIGHBOUR=str(15 * GIB)
    )
    assert wait_for(lambda: any(what == "fails" for _, _, what, _ in gpus.happened()))
    assert wait_for(lambda: bool(list(earlier_starts(LeaseFolder(gpus.folder / "leases"), None))))
    (gpus.folder / "use.1").write_text("")
    errors = job.communicate(timeout=200)[1]
    assert (job.returncode, used(gpus)) == (0, [[simulated_gpus.uuid(0)]]), errors
    assert "Waiting for a device" in errors


def test_missing_nvml_lets_the_command_run_with_the_reason(gpus):
    gpus.are("fails init 18")
    status, out, errors = run(gpus, ("--gpus", "auto"), PRINT)
    assert (status, out) == (0, "visible= order=\n")
    assert "Did not choose devices" in errors
    assert "version mismatch" in errors
    assert run(gpus, ("--gpus", "2,"), PRINT)[1] == "visible=2 order=PCI_BUS_ID\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpus", "some"), "is invalid"),
    ],
)
def test_an_option_that_cannot_be_understood_is_a_mistake(gpus, options, told):
    status, out, errors = run(gpus, options, PRINT)
    assert (status, out) == (2, "")
    assert told in errors
