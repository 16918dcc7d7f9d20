"""A SLURM of one node, and ``vllm serve`` in small under the real ``oomguard run``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.supervising import RUN, wait_for

# A SLURM of one node on this machine: its controller, the daemon of its node, and munge, in a folder of their own.

ROOT = Path(__file__).parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd")
SLURM_LIMIT_S = 90
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=2
NodeName=localhost CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@dataclass(frozen=True)
class Slurm:
    """The cluster: ``env`` is what its programs need."""

    folder: Path
    env: dict[str, str]

    def ask(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script in the folder, and return the job."""
        path = self.folder / f"job-{secrets.token_hex(4)}.sh"
        path.write_text(script)
        words = (
            "sbatch",
            "--parsable",
            "--output",
            str(self.folder / "out.%j"),
            "--open-mode",
            "append",
            *options,
        )
        return self.ask(*words, "--chdir", str(self.folder / "jobs"), str(path))

    def output(self, job: str) -> str:
        path = self.folder / f"out.{job}"
        return path.read_text(errors="replace") if path.exists() else ""

    def told(self, job: str, form: str) -> str:
        return self.ask("squeue", "--noheader", "--states=all", "--jobs", job, "--format", form)

    def wait_for(self, job: str, *states: str) -> None:
        assert wait_for(lambda: self.told(job, "%T") in states, SLURM_LIMIT_S), (
            f"{self.told(job, chr(37) + chr(84))}\n{self.output(job)}"
        )

    def wait_for_requeue(self, job: str) -> None:
        """Wait until a job that ran is back in the queue."""
        assert wait_for(lambda: self.told(job, "%T %r") == "PENDING BeginTime", SLURM_LIMIT_S), (
            self.output(job),
            self.told(job, "%T"),
        )

    def begin_now(self, job: str) -> None:
        """Begin a job that was requeued, once its last start is gone: SLURM itself waits two minutes for that."""
        assert wait_for(lambda: "DUE TO JOB REQUEUE" in self.output(job), SLURM_LIMIT_S)
        time.sleep(1.5)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Start the daemons; skip where they are not installed, or may not be started."""
    where = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [name for name in DAEMONS if shutil.which(name, path=where) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed: Debian's slurm-wlm and munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd is to be started by root")
    folder = Path(
        f"/tmp/slurm-{secrets.token_hex(4)}"
    )  # munge takes no socket below a folder that others may write
    for name in ("", "state", "spool", "bin", "jobs"):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    controller, node = free_ports()
    conf = CONFIGURATION.format(
        folder=folder, controller=controller, node=node, cpus=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "bin" / "oomguard").write_text(
        f'#!/bin/sh\nexec {sys.executable} -P -m oomguard "$@"\n'
    )
    (folder / "bin" / "oomguard").chmod(0o755)
    env = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{folder / 'bin'}:{where}",
    }
    env |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "home")}
    daemons = []
    try:
        munge = [
            f"--{name}-file={folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")
        ]
        for words in (
            ("munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *munge),
            ("slurmctld", "-D"),
            ("slurmd", "-D", "-N", "localhost"),
        ):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemons.append(subprocess.Popen(words, env=env, **quiet))
        cluster = Slurm(folder, env)
        if not wait_for(lambda: _is_up(cluster), 30):
            pytest.skip("SLURM does not start here")
        yield cluster
        subprocess.run(("scancel", "--user", "root"), env=env, check=False, timeout=60)
        wait_for(lambda: not cluster.ask("squeue", "--noheader"), 30)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _is_up(cluster: Slurm) -> bool:
    asked = subprocess.run(
        ("sinfo", "--noheader", "--format=%T"),
        env=cluster.env,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() == "idle"


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


# ``vllm serve`` in small, under the real ``oomguard run``.

SERVER_LIMIT_S = 40  # what a machine under load may take
PROGRAM = Path(__file__).with_name("fake_serve.py")


@dataclass
class Served:
    """A run of the small server."""

    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    connections: list[http.client.HTTPConnection] = field(default_factory=list)

    def order(self, name: str, text: str = "") -> None:
        (self.folder / "orders" / name).write_text(text)

    def forget(self, name: str) -> None:
        (self.folder / "orders" / name).unlink(missing_ok=True)

    def said(self) -> list[dict]:
        """Events of oomguard so far."""
        found = []
        for line in (self.folder / "errors").read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def told(self, words: str) -> list[dict]:
        return [event for event in self.said() if words in event["event"]]

    def wait_for(self, words: str, count: int = 1) -> dict:
        assert wait_for(lambda: len(self.told(words)) >= count, SERVER_LIMIT_S), (
            words,
            self.said(),
        )
        return self.told(words)[count - 1]

    def request(self) -> http.client.HTTPConnection:
        """Send a request, and wait for no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self.connections.append(connection)
        connection.request("POST", "/v1/completions", "{}")
        return connection

    def starts(self) -> int:
        path = self.folder / "starts"
        return len(path.read_text().split()) if path.exists() else 0

    def end(self) -> int:
        """Stop the run as its user would."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


Serve = Callable[..., Served]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start runs of the small server, each with options of oomguard and flags of the server; those that are left are ended."""
    started: list[Served] = []

    def start(
        *options: str,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Served:
        port = free_port()
        (tmp_path / "orders").mkdir(exist_ok=True)
        (tmp_path / "vllm").unlink(missing_ok=True)
        (tmp_path / "vllm").symlink_to(PROGRAM)
        command = [sys.executable, str(tmp_path / "vllm"), "serve", "./tiny", "--port", str(port)]
        command += [
            "--orders",
            str(tmp_path / "orders"),
            "--starts",
            str(tmp_path / "starts"),
            *flags,
        ]
        with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
            process = subprocess.Popen(
                [*prefix, *RUN, "-v", "--log-format", "json", *options, "--", *command],
                stdout=out,
                stderr=errors,
                env={**os.environ, **(env or {})},
            )
        started.append(Served(tmp_path, process, port))
        return started[-1]

    yield start
    for served in started:
        for connection in served.connections:
            connection.close()
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            try:
                served.process.wait(60)
            except subprocess.TimeoutExpired:
                served.process.kill()
                served.process.wait()
