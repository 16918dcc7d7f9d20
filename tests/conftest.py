"""What all tests share: where ../shared lies, a clean state folder, and a check that no process is left behind."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from oomguard.core import log

if TYPE_CHECKING:
    from support.placing import Gpus

ROOT = Path(__file__).parents[1]

# How long an example takes says what else the machine does: benchmarks judge time, tests do not. Where a red run stands in
# everybody's way the examples are the same each time; elsewhere new ones are looked for.
settings.register_profile(
    "oomguard",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("oomguard")
# One thread of torch in each process: on a machine whose cores are taken, several spin while they wait for one another, and a
# test of seconds takes minutes. Set before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What oomguard keeps between runs (parsed rules, the compiled anchors) is kept for this session only."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp().parent / "oomguard-cache")
    yield
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of tests and of what they start lie in pytest's folder: what a killed run cannot remove goes with it."""
    before, tempfile.tempdir = os.environ.get("TMPDIR"), None
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("t"))
    yield
    os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    tempfile.tempdir = None


@pytest.fixture(autouse=True, scope="session")
def _signals_as_usual() -> Iterator[None]:
    """What a test starts obeys Ctrl-C and a hangup, also where the suite was started with them ignored (``nohup … &``).

    A handler of ours that does nothing ignores them here still; a program that is started has the default again.
    """
    stops = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
    ignored = [number for number in stops if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own journal, or obeys the user's own options."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in list(os.environ):
        if name.startswith("OOMGUARD_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_as_usual() -> Iterator[None]:
    """Neither a command line that ran in this process nor who captured events decides where those of later tests go."""
    yield
    log._writer.clear()
    log._least.clear()
    if "structlog" in sys.modules:  # structlog.testing leaves it configured
        sys.modules["structlog"].reset_defaults()


@pytest.fixture(autouse=True)
def _priority_as_usual() -> Iterator[None]:
    """A test gives its own process no other priority: all that later tests start would have it too."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    after = os.getpriority(os.PRIO_PROCESS, 0)
    assert after == before, f"nice {before} before, {after} after"


@pytest.fixture(autouse=True)
def _no_process_left() -> object:
    """Every process that a test started has ended when the test does."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    alive = [
        child for child in psutil.Process().children(recursive=True) if child.pid not in before
    ]
    for _ in range(30):  # one that was only just forked does not say yet what it is
        _, alive = psutil.wait_procs(
            [child for child in alive if not _is_resource_tracker(child)], timeout=1
        )
        if not alive:
            break
    names = [f"{child.pid} {child.name()}" for child in alive if child.is_running()]
    assert not names, f"left running: {names}"


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is the helper that multiprocessing keeps for as long as Python runs."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Print a figure with the name of the GPU it was measured on, also where pytest takes what is printed."""
    from oomguard.probe import nvml

    names = ", ".join(dict.fromkeys(device.name or "" for device in nvml.devices() or ())) or "GPU"

    def tell(what: str, value: object, goal: str = "") -> None:
        with capsys.disabled():
            print(f"\n{names}: {what}: {value}{f' (goal {goal})' if goal else ''}")

    return tell


@pytest.fixture(scope="session")
def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of this run share; a run without workers has its own: the parent is of all runs ever."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def shared() -> Path:
    """The team's folder beside the checkout: seeds, corpus, data."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("../shared is not here")
    return folder


# Notes that it ran and hands over to the module whose name it took; needs nothing that Python loads after its first module.
STAND_IN = """import posix, sys
posix.close(posix.open({note!r} + str(posix.getpid()), posix.O_CREAT | posix.O_WRONLY))
before = sys.path[:]
sys.path[:] = [entry for entry in before if entry not in ("", ".", {folder!r})]
del sys.modules[__name__]
try:
    __import__(__name__)
finally:
    sys.path[:] = before
"""


@functools.cache
def _importable() -> frozenset[str]:
    """Every module of Python and of the packages installed here, what Python looks for by itself, and engines that may be absent."""
    installed = {name for name in packages_distributions() if name.isidentifier()}
    absent = {
        "oomguard",
        "vllm",
        "torch",
        "transformers",
        "numpy",
        "sitecustomize",
        "usercustomize",
    }
    return frozenset({*sys.stdlib_module_names, *installed, *absent})


class Stranger:
    """A stranger's model folder, with a file for each module that could be taken from it."""

    def __init__(self, folder: Path, notes: Path) -> None:
        self.folder, self.notes = folder, notes
        folder.mkdir()
        notes.mkdir()
        for name in _importable() - {"packaging"}:
            self.plant(name)
        (folder / "packaging").mkdir()
        self.plant("packaging", "packaging/__init__.py")

    def plant(self, name: str, path: str | None = None) -> None:
        text = STAND_IN.format(note=f"{self.notes}/{name}.", folder=str(self.folder))
        (self.folder / (path or f"{name}.py")).write_text(text)

    def ran(self) -> dict[str, set[int]]:
        """The modules of this folder that ran since the last call, and in which processes."""
        found: dict[str, set[int]] = {}
        for note in self.notes.iterdir():
            name, _, pid = note.name.rpartition(".")
            found.setdefault(name, set()).add(int(pid))
            note.unlink()
        return found


@pytest.fixture
def stranger(tmp_path: Path) -> Stranger:
    """A folder with a config.json to be added, and code that tells when it runs."""
    return Stranger(tmp_path / "stranger", tmp_path / "notes")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C library of NVML that tells of simulated GPUs (examples/simulated_gpus.c)."""
    from support.placing import simulated_gpus

    if simulated_gpus.compiler() is None:
        pytest.skip("no C compiler to build the simulated NVML with")
    return simulated_gpus.build(tmp_path_factory.mktemp("nvml-library"))


@pytest.fixture
def gpus(tmp_path: Path, nvml_library: Path) -> Gpus:
    """Four simulated GPUs of 24 GiB, with an engine on PATH and a model for it."""
    from support.placing import made

    (tmp_path / "gpus").mkdir()
    return made(tmp_path / "gpus", library=nvml_library)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Any]:
    """A PostgreSQL server of this worker's own, in a folder that goes with it (examples/throwaway_postgresql.py)."""
    from support.postgresql import throwaway

    if throwaway.programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with throwaway.server() as server:
        yield server


@pytest.fixture
def database(postgresql: Any) -> str:
    """The URL of an empty database."""
    return str(postgresql.create(f"t{uuid.uuid4().hex}"))
