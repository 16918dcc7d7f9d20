"""What all tests share: where ../shared lies, a clean state folder, and a check that no process is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What oomguard keeps between runs (parsed rules, the compiled anchors) is kept for this session only."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp().parent / "oomguard-cache")
    yield
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


@pytest.fixture(autouse=True)
def _state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own journal, or obeys the user's own options."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name.startswith("OOMGUARD_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_process_left() -> object:
    """Every process that a test started has ended when the test does."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=5)
    names = [
        f"{child.pid} {child.name()}"
        for child in alive
        if child.is_running() and "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert not names, f"left running: {names}"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The team's folder beside the checkout: seeds, corpus, data."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("../shared is not here")
    return folder
