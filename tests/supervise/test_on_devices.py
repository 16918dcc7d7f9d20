"""A run that is placed: on devices where its plan fits, one start at a time, moved where a neighbour is in the way."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from oomguard.placement.leases import LeaseFolder
from oomguard.placement.turns import waiting_before
from support.placing import Gpus, made, overlaps, serve, simulated_gpus, start
from support.supervising import wait_for

GIB = 2**30
PRINT = ["sh", "-c", "echo visible=$CUDA_VISIBLE_DEVICES order=$CUDA_DEVICE_ORDER"]


def run(gpus: Gpus, options: tuple[str, ...], command: list[str], **env: str) -> tuple[int, str, str]:
    job = start(gpus, options, command, **env)
    out, errors = job.communicate(timeout=200)
    return job.returncode, out, errors


def used(gpus: Gpus) -> list[list[str]]:
    return [uuids for _, _, what, uuids in gpus.happened() if what == "ends"]


def holders(gpus: Gpus) -> list[str]:
    return list(LeaseFolder(gpus.folder / "leases", makes=False).holders(simulated_gpus.uuid(i) for i in range(4)))


def test_an_engine_that_reads_uuids_gets_one(gpus):
    status, _, errors = run(gpus, ("--gpus", "auto"), serve(gpus))
    assert (status, used(gpus)) == (0, [[simulated_gpus.uuid(0)]]), errors
    assert f"CUDA_VISIBLE_DEVICES={simulated_gpus.uuid(0)}" in errors


def test_an_older_one_whose_int_would_end_the_start_gets_an_index(tmp_path, nvml_library):
    gpus = made(tmp_path, library=nvml_library)
    for path in (gpus.folder / "site").glob("*.dist-info"):
        (path / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n")
    status, _, errors = run(gpus, ("--gpus", "auto"), serve(gpus))
    assert (status, used(gpus)) == (0, [[simulated_gpus.uuid(0)]]), errors
    assert "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID" in errors


def test_ranks_decide_how_many(gpus):
    status, _, errors = run(gpus, ("--gpus", "auto"), serve(gpus, "-tp", "2"))
    assert (status, used(gpus)) == (0, [[simulated_gpus.uuid(0), simulated_gpus.uuid(1)]]), errors


def test_a_device_that_others_use_is_left_for_an_empty_one(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(i): 9 * GIB for i in (0, 1)})
    assert run(gpus, ("--gpus", "auto"), serve(gpus))[0] == 0
    assert used(gpus) == [[simulated_gpus.uuid(2)]]


def test_a_script_gets_a_device_that_nobody_uses_and_is_told_why(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 2 * GIB})
    status, out, errors = run(gpus, ("--gpus", "auto"), PRINT)
    assert (status, out) == (0, "visible=1 order=PCI_BUS_ID\n")
    assert "what it needs is not known" in errors


@pytest.mark.parametrize(
    ("asked", "visible"),
    [("2", "0,1"), ("2,0", "2,0"), ("3,", "3"), (f"{simulated_gpus.uuid(3)},1", "3,1")],
    ids=["number", "list", "one", "uuid"],
)
def test_a_number_or_a_list_decides_and_a_list_s_order_is_kept(gpus, asked, visible):
    _, out, errors = run(gpus, ("--gpus", asked), PRINT)
    assert out.split()[0] == f"visible={visible}", errors


def test_the_order_of_the_user_s_variable_is_kept(gpus):
    _, out, errors = run(gpus, ("--gpus", "2"), PRINT, CUDA_VISIBLE_DEVICES="1,0")
    assert out.split()[0] == "visible=1,0", errors


def test_the_user_s_variable_is_a_limit(gpus):
    _, out, errors = run(gpus, ("--gpus", "auto"), PRINT, CUDA_VISIBLE_DEVICES="3,2")
    assert out.split()[0] in {"visible=2", "visible=3"}
    assert "hides GPU 0, GPU 1" in errors
    status, _, errors = run(gpus, ("--gpus", "0,"), PRINT, CUDA_VISIBLE_DEVICES="3,2")
    assert status == 2
    assert (
        "--gpus names 0, which is not among the devices here (GPU 3, GPU 2; CUDA_VISIBLE_DEVICES=3,2 hides GPU 0, GPU 1)"
        in errors
    )


def test_a_variable_that_the_command_sets_itself_is_told_before_the_start(gpus):
    status, out, errors = run(gpus, ("--gpus", "auto"), ["env", "CUDA_VISIBLE_DEVICES=0", *PRINT])
    assert (status, out) == (2, "")
    assert "the command sets CUDA_VISIBLE_DEVICES=0 itself" in errors


def test_what_fits_nowhere_is_said_before_any_start_with_both_numbers_and_a_command(gpus):
    command = [word for word in serve(gpus) if word not in ("--max-model-len", "8192")]
    status, _, errors = run(gpus, ("--gpus", "auto", "--wait", "1h"), command)

    assert (status, gpus.happened()) == (125, [])
    assert re.search(r"it takes 3\d\.\d\d GiB of a device at least, and GPU 0, the largest, has 24\.00 GiB", errors)
    assert re.search(r"oomguard run --gpus auto --wait 1h -- vllm serve \S+ --max-model-len \d+\n", errors)


def test_more_ranks_than_devices_are_said_with_the_command_over_those_there_are(gpus):
    status, _, errors = run(gpus, ("--gpus", "auto"), serve(gpus, "-tp", "8"))
    assert (status, gpus.happened()) == (125, [])
    assert "8 devices are needed, 4 can be used" in errors
    assert "--tensor-parallel-size 4" in errors


def test_fewer_devices_than_its_own_flags_need_are_a_mistake(gpus):
    status, _, errors = run(gpus, ("--gpus", "1"), serve(gpus, "-tp", "2"))
    assert status == 2
    assert "need 2 devices, and --gpus gives 1" in errors


def test_a_lease_lasts_until_the_engine_has_started_and_no_longer(gpus):
    with start(gpus, ("--gpus", "auto"), serve(gpus), SIMULATED_START_S="1", SIMULATED_RUN_S="30") as job:
        assert wait_for(lambda: holders(gpus) == [simulated_gpus.uuid(0)])
        assert wait_for(lambda: any(what == "started" for _, _, what, _ in gpus.happened()))
        assert wait_for(lambda: holders(gpus) == [], 10)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        job.communicate()


def test_a_lease_of_the_job_lasts_until_it_ends(gpus):
    with start(gpus, ("--gpus", "auto", "--lease", "job"), serve(gpus), SIMULATED_RUN_S="1.5") as job:
        assert wait_for(lambda: any(what == "started" for _, _, what, _ in gpus.happened()))
        time.sleep(0.6)
        assert holders(gpus) == [simulated_gpus.uuid(0)]
        job.communicate()
    assert holders(gpus) == []


def test_a_killed_holder_s_lease_is_free_within_a_second(gpus):
    with start(gpus, ("--gpus", "auto"), ["sleep", "60"]) as job:
        assert wait_for(lambda: bool(holders(gpus)))
        job.kill()
        began_s = time.monotonic()
        assert wait_for(lambda: not holders(gpus), 10)
        assert time.monotonic() - began_s < 1


def test_without_wait_a_taken_device_is_named_with_who_has_it_and_nothing_starts(gpus):
    gpus.are_alike(1)
    with start(gpus, ("--gpus", "auto"), ["sleep", "60"]) as job:
        assert wait_for(lambda: bool(holders(gpus)))
        status, out, errors = run(gpus, ("--gpus", "auto"), PRINT)
        assert (status, out) == (125, "")
        assert f"GPU 0: leased by pid {job.pid} (sleep 60) for" in errors
        assert f"oomguard run --gpus auto --wait 30m -- {shlex.join(PRINT)}\n" in errors
        job.send_signal(signal.SIGTERM)
        job.communicate()


def test_a_wait_that_is_over_says_how_long_it_was(gpus):
    gpus.are_alike(1)
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    status, _, errors = run(gpus, ("--gpus", "auto", "--wait", "1s"), PRINT)
    assert status == 125
    assert re.search(r"0 free now, also after 1 s: GPU 0: somebody uses it.*held by pid \d+ 9\.00 GiB", errors)


def test_a_user_s_stop_ends_the_wait_and_nothing_is_started(gpus):
    gpus.are_alike(1)
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    with start(gpus, ("--gpus", "auto", "--wait", "1h"), PRINT) as job:
        assert wait_for(lambda: bool(list(waiting_before(LeaseFolder(gpus.folder / "leases"), None))))
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (128 + signal.SIGTERM, "")
    assert not list((gpus.folder / "leases").glob("turn-*"))


def test_several_wait_for_one_device_and_go_in_the_order_in_which_they_came(gpus):
    gpus.are_alike(1)
    folder, options = LeaseFolder(gpus.folder / "leases"), ("--gpus", "auto", "--wait", "3m", "--lease", "job")
    first = start(gpus, options, ["sleep", "600"])
    assert wait_for(lambda: bool(holders(gpus)))
    others = []
    for count in (1, 2):
        others.append(start(gpus, options, ["sh", "-c", f"echo {count} >> {gpus.folder}/order; sleep 0.5"]))
        assert wait_for(lambda: len(list(waiting_before(folder, None))) == len(others))
    first.send_signal(signal.SIGTERM)
    ended = [job.communicate(timeout=200)[1] for job in (first, *others)]

    assert [job.returncode for job in others] == [0, 0], ended
    assert (gpus.folder / "order").read_text() == "1\n2\n"
    assert "waiting for a device" in ended[1]


def test_starts_at_one_moment_share_no_device_and_two_starts_never_meet(gpus):
    gpus.are_alike(2)
    options = ("--gpus", "auto", "--wait", "3m")
    jobs = [start(gpus, (*options, "--lease", "job"), serve(gpus)) for _ in range(4)]
    ended = [job.communicate(timeout=200)[1] for job in jobs]

    assert [job.returncode for job in jobs] == [0] * 4, ended
    assert overlaps(gpus, "ends") == []


def test_a_neighbour_that_came_meanwhile_is_left_for_another_device_before_anything_is_reduced(gpus):
    status, _, errors = run(
        gpus, ("--gpus", "auto", "--allow", "reduces-capacity"), serve(gpus), SIMULATED_NEIGHBOUR=str(15 * GIB)
    )
    assert (status, used(gpus)) == (0, [[simulated_gpus.uuid(1)]]), errors
    assert f"running again: device={simulated_gpus.uuid(0)} -> {simulated_gpus.uuid(1)}" in errors


def test_what_is_known_to_work_says_nothing_of_a_device_that_had_room_then(gpus, tmp_path):
    journal = ("--journal", str(tmp_path / "journal"))
    assert run(gpus, ("--gpus", "auto", *journal), serve(gpus), SIMULATED_NEIGHBOUR=str(15 * GIB))[0] == 0
    (gpus.folder / "use.1").write_text("")
    status, _, errors = run(gpus, ("--gpus", "auto", "--reuse", *journal), serve(gpus))
    assert status == 0, errors
    assert "device=" not in errors
    assert used(gpus) == [[simulated_gpus.uuid(1)], [simulated_gpus.uuid(0)]]


def test_without_another_device_it_waits_where_that_was_asked_for(gpus):
    gpus.are_alike(1)
    job = start(gpus, ("--gpus", "auto", "--wait", "2m"), serve(gpus), SIMULATED_NEIGHBOUR=str(15 * GIB))
    assert wait_for(lambda: any(what == "fails" for _, _, what, _ in gpus.happened()))
    assert wait_for(lambda: bool(list(waiting_before(LeaseFolder(gpus.folder / "leases"), None))))
    (gpus.folder / "use.1").write_text("")
    errors = job.communicate(timeout=200)[1]
    assert (job.returncode, used(gpus)) == (0, [[simulated_gpus.uuid(0)]]), errors
    assert "waiting for a device" in errors


def test_where_no_device_becomes_free_in_time_it_goes_on_with_less(gpus):
    gpus.are_alike(1)
    options = ("--gpus", "auto", "--wait", "1s", "--allow", "reduces-capacity")
    status, _, errors = run(gpus, options, serve(gpus), SIMULATED_NEIGHBOUR=str(5 * GIB))
    assert status == 0, errors
    assert errors.index("no device became free") < errors.index("running again: gpu_memory_utilization=0.9 -> 0.7")
    assert used(gpus) == [[simulated_gpus.uuid(0)]]


def test_a_device_that_the_user_named_is_not_moved_from(gpus):
    status, _, errors = run(gpus, ("--gpus", "0,", "--dry-run"), serve(gpus), SIMULATED_NEIGHBOUR=str(15 * GIB))
    assert status == 1
    assert "device=" not in errors
    assert "GPU 1 has room" not in errors


def test_a_pinned_device_is_not_moved_from(gpus):
    status, _, errors = run(
        gpus, ("--gpus", "auto", "--pin", "device", "--dry-run"), serve(gpus), SIMULATED_NEIGHBOUR=str(15 * GIB)
    )
    assert status == 1
    assert "GPU 1 has room" not in errors


def test_without_nvml_the_command_runs_as_it_is_and_the_reason_is_told(gpus):
    gpus.are("fails init 18")
    status, out, errors = run(gpus, ("--gpus", "auto"), PRINT)
    assert (status, out) == (0, "visible= order=\n")
    assert "not placed" in errors
    assert "version mismatch" in errors
    assert run(gpus, ("--gpus", "2,"), PRINT)[1] == "visible=2 order=PCI_BUS_ID\n"


def test_a_gpu_that_falls_off_while_a_start_waits_is_left_out_and_the_other_is_taken(gpus):
    gpus.are_alike(2)
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(i): 9 * GIB for i in (0, 1)})
    job = start(gpus, ("--gpus", "auto", "--wait", "2m"), PRINT)
    assert wait_for(lambda: bool(list(waiting_before(LeaseFolder(gpus.folder / "leases"), None))))
    gpus.are(simulated_gpus.line(0, more="lost"), simulated_gpus.line(1))
    simulated_gpus.take(gpus.folder, os.getpid(), {})
    out, errors = job.communicate(timeout=100)
    assert (job.returncode, out.split()[0]) == (0, "visible=1"), errors


def test_an_instance_that_an_older_engine_would_die_on_is_refused_with_the_reason(gpus):
    gpus.are(simulated_gpus.line(0, 80, "H100", "mig"), f"mig MIG-b {40 * GIB} 0 H100_MIG_4g.40gb")
    assert run(gpus, ("--gpus", "auto"), serve(gpus))[0] == 0
    assert used(gpus) == [["MIG-b"]]
    for path in (gpus.folder / "site").glob("*.dist-info"):
        (path / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n")
    status, _, errors = run(gpus, ("--gpus", "auto"), serve(gpus))
    assert status == 125
    assert "vllm 0.20.0 does not start on an instance (MIG): its int() of a UUID" in errors


def test_a_gpu_that_is_divided_meanwhile_is_used_by_its_instances(gpus):
    gpus.are_alike(1, 80, "H100")
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 70 * GIB})
    job = start(gpus, ("--gpus", "auto", "--wait", "2m"), PRINT)
    assert wait_for(lambda: bool(list(waiting_before(LeaseFolder(gpus.folder / "leases"), None))))
    gpus.are(simulated_gpus.line(0, 80, "H100", "mig"), f"mig MIG-b {40 * GIB} 1 H100_MIG_4g.40gb")
    out, errors = job.communicate(timeout=100)
    assert (job.returncode, out.split()[0]) == (0, "visible=MIG-b"), errors


def test_a_lease_folder_that_cannot_be_used_is_told_and_the_command_runs(gpus, tmp_path):
    (tmp_path / "file").touch()
    status, out, errors = run(gpus, ("--gpus", "auto", "--lease-folder", str(tmp_path / "file" / "x")), PRINT)
    assert (status, out) == (0, "visible=0 order=PCI_BUS_ID\n")
    assert "no leases: two starts at one moment may choose one device" in errors


def test_a_run_inside_a_run_gets_what_the_command_in_it_needs(gpus):
    ours = [sys.executable, "-m", "oomguard", "run", "--gpus", "auto", "--"]
    status, _, errors = run(gpus, ("--gpus", "auto"), [*ours, *serve(gpus, "-tp", "2")])
    assert (status, used(gpus)) == (0, [[simulated_gpus.uuid(0), simulated_gpus.uuid(1)]]), errors


def test_a_run_inside_a_run_has_the_leases_of_the_outer_one(gpus):
    gpus.are_alike(1)
    inner = [sys.executable, "-m", "oomguard", "run", "--gpus", "auto", "--", *PRINT]
    status, out, errors = run(gpus, ("--gpus", "auto"), inner)
    assert (status, out) == (0, "visible=0 order=PCI_BUS_ID\n"), errors


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--wait", "5m"), "no --gpus says which"),
        (("--gpus", "auto", "--wait", "soon"), "is no time such as 30m"),
        (("--gpus", "some"), "not understood"),
        (("--gpus", "9,"), "--gpus names 9"),
        (("--gpus", "auto", "--lease-folder", ""), "--lease-folder '' names no folder"),
    ],
)
def test_an_option_that_cannot_be_understood_is_a_mistake(gpus, options, told):
    status, out, errors = run(gpus, options, PRINT)
    assert (status, out) == (2, "")
    assert told in errors


def test_a_command_without_gpus_is_not_placed(gpus):
    assert run(gpus, (), PRINT) == (0, "visible= order=\n", "")
    assert not (gpus.folder / "leases").exists()


def test_what_a_wrapper_keeps_from_the_program_is_told(gpus, tmp_path):
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 0\n")
    docker.chmod(0o755)
    ran = subprocess.run(
        [sys.executable, "-m", "oomguard", "run", "--gpus", "auto", "--", str(docker), "run", "image"],
        env={**os.environ, **gpus.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0
    assert "docker hands no variable on" in ran.stderr


def test_the_deadline_ends_the_wait_for_a_device_and_nothing_starts(gpus):
    gpus.are_alike(1)
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    status, out, errors = run(gpus, ("--gpus", "auto", "--wait", "1h", "--deadline", "3"), PRINT)
    assert (status, out) == (125, "")
    assert re.search(
        r"0 free now, also after [23] s: .*; the deadline permits no longer wait\n  a later --deadline", errors
    )


def test_the_line_to_paste_keeps_the_run_s_other_options(gpus, tmp_path):
    journal = tmp_path / "a journal"
    command = [word for word in serve(gpus) if word not in ("--max-model-len", "8192")]
    options = ("--restart", "on-failure", f"--gpus={simulated_gpus.uuid(0)},", "--journal", str(journal))
    _, _, errors = run(gpus, options, command)
    kept = shlex.join(["--restart", "on-failure", "--gpus", simulated_gpus.uuid(0), "--journal", str(journal)])
    assert f"\n  oomguard run {kept} -- vllm serve" in errors


def test_before_a_refusal_nothing_is_said_of_a_device_that_it_gets(gpus):
    gpus.are_alike(1)
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    for options in (("--gpus", "auto"), ("--gpus", "2")):
        status, _, errors = run(gpus, options, PRINT)
        assert (status, "it gets" in errors) == (125, False)


def test_a_script_on_a_device_that_is_named_is_told_that_it_is_taken_whoever_uses_it(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    status, out, errors = run(gpus, ("--gpus", "0,"), PRINT)
    assert (status, out.split()[0]) == (0, "visible=0")
    assert "what it needs is not known: those that --gpus names are taken, whoever uses them" in errors
    assert "nobody" not in errors


def test_of_devices_that_serve_equally_well_the_first_of_the_user_s_variable_is_taken(gpus):
    for command, visible in ((PRINT, "2"), (serve(gpus), simulated_gpus.uuid(2))):
        _, _, errors = run(gpus, ("--gpus", "auto"), command, CUDA_VISIBLE_DEVICES="2,0")
        assert f"placed: on=GPU 2 CUDA_VISIBLE_DEVICES={visible} " in errors


@pytest.mark.parametrize(("asked", "status"), [("0,", 2), ("3,", 0)], ids=["hidden", "visible"])
def test_without_nvml_a_list_is_held_against_the_user_s_variable_too(gpus, asked, status):
    gpus.are("fails init 18")
    ended, out, errors = run(gpus, ("--gpus", asked), PRINT, CUDA_VISIBLE_DEVICES="3")
    assert (ended, out) == (status, "" if status else "visible=3 order=PCI_BUS_ID\n"), errors
    assert "driver=None" not in errors
