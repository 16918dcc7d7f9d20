"""oomguard gpus: each device, who holds what, its lease, and what is hidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from oomguard.cluster.placement.leases import LeaseFolder
from oomguard.probe.nvml import sees_host_pids
from support.placing import Gpus, simulated_gpus

GIB = 2**30


def show(gpus: Gpus, *options: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "oomguard", "gpus", *options],
        env={**os.environ, **gpus.env, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_each_device_shows_room_uuid_and_holders(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(1): 3 * GIB})
    lines = show(gpus).splitlines()

    assert (
        lines[0]
        == f"GPU 0  NVIDIA RTX A5000  24.00 GiB of 24.00 GiB free  {simulated_gpus.uuid(0)}"
    )
    assert lines[1].startswith("GPU 1  NVIDIA RTX A5000  21.00 GiB of 24.00 GiB free")
    assert lines[2].startswith(f"  pid {os.getpid()}")
    assert lines[2].endswith(": 3.00 GiB")


def test_a_secret_in_a_holder_s_command_is_not_shown(gpus):
    if not sees_host_pids():
        return
    with (
        subprocess.Popen(["sleep", "60"]) as plain,
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import time; time.sleep(60)",
                "--api-key",
                "sk-1234567890abcdef",
            ]
        ) as secret,
    ):
        simulated_gpus.take(gpus.folder, secret.pid, {simulated_gpus.uuid(0): GIB})
        shown = show(gpus)
        for process in (plain, secret):
            process.kill()
    assert "--api-key" in shown
    assert "sk-1234567890abcdef" not in shown


def test_a_lease_is_shown_with_who_has_it(gpus):
    folder = LeaseFolder(gpus.folder / "leases")
    locks = folder.take([simulated_gpus.uuid(2)], "vllm serve m", "start")
    assert locks is not None
    assert f"  leased by pid {os.getpid()} (vllm serve m) for " in show(gpus)
    record = json.loads(show(gpus, "--format", "json"))
    locks[simulated_gpus.uuid(2)].close()

    assert record["devices"][2]["lease"]["until"] == "start"
    assert [device["lease"] for device in record["devices"]].count(None) == 3


def test_divided_and_lost_devices_say_what_they_are(gpus):
    gpus.are(
        simulated_gpus.line(0, 80, "H100", "mig"),
        f"mig MIG-b {10 * GIB} 1 H100_MIG_1g.10gb",
        simulated_gpus.line(1, more="lost"),
        simulated_gpus.line(2, more="noprocesses"),
        simulated_gpus.line(3, more=f"held={9 * GIB}"),
    )
    assert show(gpus).splitlines() == [
        "GPU 0  divided (MIG): only its instances are usable",
        "  instance 1  H100 MIG 1g.10gb  10.00 GiB of 10.00 GiB free  MIG-b",
        "GPU 1  it does not answer: GPU is lost",
        f"GPU 2  NVIDIA RTX A5000  24.00 GiB of 24.00 GiB free  {simulated_gpus.uuid(2)}",
        f"GPU 3  NVIDIA RTX A5000  15.00 GiB of 24.00 GiB free  {simulated_gpus.uuid(3)}",
        "GPU 2: the driver does not report which processes use it (an old driver, MIG, or no permission)",
        "GPU 3: processes that are not visible here hold 9.00 GiB",
    ]


def test_what_the_variable_hides_is_said(gpus):
    shown = show(gpus, CUDA_VISIBLE_DEVICES="1")
    assert shown.splitlines()[0].endswith("hidden by CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES=1 hides GPU 0, GPU 2, GPU 3" in shown
    record = json.loads(show(gpus, "--format", "json", CUDA_VISIBLE_DEVICES="1"))
    assert [device["is_visible"] for device in record["devices"]] == [False, True, False, False]


def test_silent_nvml_is_explained_with_status_0(gpus):
    gpus.are("fails init 18")
    assert "version mismatch" in show(gpus)
    record = json.loads(show(gpus, "--format", "json"))
    assert record["devices"] == []
    assert "version mismatch" in record["failure"]


def test_a_folder_that_holds_no_leases_is_told(gpus, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert f"no leases: every user can remove other users' files in {tmp_path}/open" in show(
        gpus, OOMGUARD_LEASE_FOLDER=str(tmp_path / "open")
    )
