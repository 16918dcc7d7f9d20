"""A snapshot is taken at the first failure, before anything is freed, and never at the cost of the program; CUDA is mocked."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oomguard
from oomguard.core.errors import SettingError
from oomguard.engines.vllm import plugin
from oomguard.probe import snapshot_recorder
from oomguard.probe.snapshot_recorder import MOST_EVENTS, VARIABLE, SnapshotRecorder, record_here
from support.made_snapshots import example

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

pytestmark = pytest.mark.torch


class Cuda:
    """torch's recording as the allocator has it: what was asked of it, and what it dumps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.is_initialized, self.is_recording = True, False
        self.dumped: Any = example().in_pieces()
        self.waiting: list[Callable[[], None]] = []
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.is_initialized)
        monkeypatch.setattr(torch.cuda, "_lazy_call", self.lazy_call)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(
            torch._C, "_cuda_isHistoryEnabled", lambda: self.is_recording, raising=False
        )
        monkeypatch.setattr(
            torch._C, "_cuda_attach_out_of_memory_observer", self.observers.append, raising=False
        )
        monkeypatch.setattr(snapshot_recorder, "_observed", [])
        monkeypatch.setattr(snapshot_recorder, "_open", [])
        monkeypatch.setenv(VARIABLE, "")  # so that what the recordings set is taken back
        monkeypatch.delenv(VARIABLE)

    def lazy_call(self, callback: Callable[[], None]) -> None:
        if self.is_initialized:
            callback()
        else:
            self.waiting.append(callback)

    def record(self, enabled: str | None = "all", **options: Any) -> None:
        self.asked.append({"enabled": enabled, **options})
        self.is_recording = enabled is not None

    def dump(self, filename: str) -> None:
        if isinstance(self.dumped, Exception):
            raise self.dumped
        Path(filename).write_bytes(pickle.dumps(self.dumped))

    def refuse(self) -> None:
        """The allocator gives up: what the observers do comes before the exception."""
        for observer in self.observers:
            observer(0, 1 << 30, 1 << 34, 1 << 20)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_guard_records_inside_and_takes_the_first_failure(cuda: Cuda, tmp_path: Path):
    path = tmp_path / "snapshot.pickle"
    with pytest.raises(torch.OutOfMemoryError), oomguard.guard(snapshot=path) as g:
        assert cuda.asked == [
            {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": MOST_EVENTS}
        ]
        cuda.refuse()
    assert cuda.asked[-1] == {"enabled": None}
    assert g.snapshot == path
    assert oomguard.diagnose(path).incidents[0].causes[0].id == "fragmentation"


def test_handled_failure_is_recorded_and_later_ones_are_not(cuda: Cuda, tmp_path: Path):
    path = tmp_path / "snapshot.pickle"
    with oomguard.guard(snapshot=path):
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                cuda.refuse()
            assert path.exists()
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["snapshot.pickle"]


def test_torch_without_observers_is_asked_at_the_exception(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")
    with (
        pytest.raises(torch.OutOfMemoryError),
        oomguard.guard(snapshot=tmp_path / "snapshot.pickle"),
    ):
        cuda.refuse()
    assert (tmp_path / "snapshot.pickle").exists()


def test_split_call_keeps_the_snapshot_of_its_first_failure(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")

    @oomguard.guard(batch="rows", snapshot=tmp_path / "snapshot.pickle")
    def double(rows: list[int]) -> list[int]:
        if len(rows) > 4:
            cuda.refuse()
        return [2 * row for row in rows]

    with limit_memory("1 GiB"):
        assert double(list(range(16))) == [2 * row for row in range(16)]
    assert [file.name for file in tmp_path.glob("snap*")] == ["snapshot.pickle"]


def test_attempts_record_until_the_first_failure(cuda: Cuda, tmp_path: Path):
    sizes, recorded = [], []
    with limit_memory("1 GiB"):
        for attempt in oomguard.attempts(batch_size=16, snapshot=tmp_path / "snapshot.pickle"):
            assert attempt.snapshot == (tmp_path / "snapshot.pickle" if sizes else None)
            with attempt:
                sizes.append(attempt.settings["batch_size"])
                recorded.append(cuda.is_recording)
                if len(sizes) == 1:
                    cuda.refuse()
                with pytest.raises(torch.OutOfMemoryError):  # a later one, which the body handles
                    cuda.refuse()
            assert not cuda.is_recording
    assert recorded == [True, False]
    assert attempt.snapshot == tmp_path / "snapshot.pickle"
    assert [file.name for file in tmp_path.glob("snap*")] == ["snapshot.pickle"]
    assert oomguard.diagnose(attempt.snapshot).incidents[0].causes[0].id == "fragmentation"


def test_attempt_takes_it_before_its_frames_go(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")
    with limit_memory("1 GiB"), pytest.raises(torch.OutOfMemoryError):
        for attempt in oomguard.attempts(snapshot=tmp_path / "snapshot.pickle"):
            with attempt:
                cuda.refuse()
    assert attempt.snapshot == tmp_path / "snapshot.pickle"


@pytest.mark.parametrize("wrong", ["", "missing/snapshot.pickle"])
def test_attempts_refuse_a_file_that_cannot_be_before_the_first(tmp_path: Path, wrong: str):
    with pytest.raises(SettingError, match="snapshot="):
        oomguard.attempts(snapshot=f"{tmp_path}/{wrong}")


def test_another_exception_takes_nothing(cuda: Cuda, tmp_path: Path):
    with (
        pytest.raises(RuntimeError, match="shape"),
        oomguard.guard(snapshot=tmp_path / "snapshot.pickle"),
    ):
        raise RuntimeError("shape mismatch")
    assert not (tmp_path / "snapshot.pickle").exists()


def test_decorated_function_records_between_its_calls(cuda: Cuda, tmp_path: Path):
    @oomguard.guard(snapshot=tmp_path / "snapshot.pickle")
    def call(fails: bool) -> None:
        if fails:
            cuda.refuse()

    assert cuda.asked == []
    call(fails=False)
    call(fails=False)
    assert len(cuda.asked) == 1
    assert cuda.is_recording
    with pytest.raises(torch.OutOfMemoryError):
        call(fails=True)
    assert (tmp_path / "snapshot.pickle").exists()


def test_cuda_is_not_begun_for_a_recording(cuda: Cuda, tmp_path: Path):
    cuda.is_initialized = False
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        assert cuda.asked == []
        cuda.is_initialized = True
        cuda.waiting[0]()
        assert cuda.is_recording
    assert not cuda.is_recording


def test_a_guard_that_is_over_records_nothing_when_cuda_begins(cuda: Cuda, tmp_path: Path):
    cuda.is_initialized = False
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        pass
    cuda.waiting[0]()
    assert cuda.asked == []


def test_what_the_program_records_by_itself_goes_on(cuda: Cuda, tmp_path: Path):
    cuda.is_recording = True
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        pass
    assert cuda.asked == []
    assert cuda.is_recording


def test_engines_inside_a_guard_find_their_report_address(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert plugin.SNAPSHOT == VARIABLE
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        assert os.environ[VARIABLE] == str(tmp_path / "snapshot.pickle")
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "of the user")
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        pass
    assert os.environ[VARIABLE] == "of the user"


def test_nested_recordings_end_with_the_outer_one(cuda: Cuda, tmp_path: Path):
    outer, inner = SnapshotRecorder(tmp_path / "a"), SnapshotRecorder(tmp_path / "b")
    inner.begin()
    outer.begin()
    inner.end()
    assert cuda.is_recording
    outer.end()
    assert not cuda.is_recording


def test_no_older_file_is_overwritten_and_the_new_one_is_named(
    cuda: Cuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "snapshot.pickle").write_text("older")
    (tmp_path / "snapshot-1.pickle").write_text("older too")
    with (
        pytest.raises(torch.OutOfMemoryError),
        oomguard.guard(snapshot=tmp_path / "snapshot.pickle"),
    ):
        cuda.refuse()
    assert (tmp_path / "snapshot.pickle").read_text() == "older"
    assert oomguard.diagnose(tmp_path / "snapshot-2.pickle").snapshot is not None
    assert (
        "snapshot-2.pickle (kept the older snapshot.pickle). Read it with: oomguard diagnose"
        in caplog.text
    )
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    "problem",
    [OSError(28, "No space left on device"), RuntimeError("not supported\nby this allocator")],
)
def test_failed_dump_is_a_note_and_the_failure_is_unchanged(
    cuda: Cuda, tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: Exception
):
    cuda.dumped = problem
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        oomguard.guard(snapshot=tmp_path / "snapshot.pickle"),
    ):
        cuda.refuse()
    assert type(caught.value) is torch.OutOfMemoryError
    (line,) = [
        record.getMessage() for record in caplog.records if "snapshot" in record.getMessage()
    ]
    assert "failed" in line
    assert "\n" not in line
    assert list(tmp_path.glob("*snapshot*")) == []


def test_a_recording_that_torch_refuses_is_a_note(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(**_options: Any) -> None:
        raise RuntimeError("cudaMallocAsync records no history")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        pass


@pytest.mark.parametrize(
    ("devices", "reason"), [(0, "no GPU is visible"), (None, "is built without CUDA")]
)
def test_without_cuda_one_line_says_that_nothing_will_be_taken(
    cuda: Cuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    devices: int | None,
    reason: str,
):
    if devices is None:
        monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    guard = oomguard.guard(snapshot=tmp_path / "snapshot.pickle")
    for _ in range(2):
        with guard:
            pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert reason in line
    assert cuda.asked == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is a folder"),
        ("missing/snapshot.pickle", "its folder does not exist"),
        ("a\0b", "its folder does not exist"),
    ],
)
def test_a_file_that_cannot_be_is_a_mistake_that_is_told_at_once(
    tmp_path: Path, name: str, reason: str
):
    with pytest.raises(SettingError, match=reason):
        oomguard.guard(snapshot=f"{tmp_path}/{name}")


def test_nothing_is_recorded_where_oomguard_is_off(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    with oomguard.guard(snapshot=tmp_path / "snapshot.pickle"):
        assert cuda.asked == []


def test_in_an_engines_process_the_recording_stays(cuda: Cuda, tmp_path: Path):
    record_here(str(tmp_path / "snapshot.pickle"))
    record_here(str(tmp_path / "snapshot.pickle"))
    assert len(cuda.asked) == 1
    with pytest.raises(torch.OutOfMemoryError):
        cuda.refuse()
    assert (tmp_path / "snapshot.pickle").exists()


def test_vllms_plugin_records_where_the_run_asks_for_it(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plugin.register()
    assert cuda.asked == []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "snapshot.pickle"))
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    plugin.register()
    assert cuda.asked == []
    monkeypatch.delenv("OOMGUARD_DISABLE")
    plugin.register()
    assert cuda.is_recording


def test_the_command_of_a_run_finds_where_to_in_its_environment(tmp_path: Path):
    ask = [sys.executable, "-c", "import os; print(os.environ['OOMGUARD_SNAPSHOT'])"]
    run = [sys.executable, "-m", "oomguard", "run", "--snapshot", "snapshot.pickle", "--", *ask]
    assert subprocess.run(
        run, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip() == str(tmp_path / "snapshot.pickle")


def test_torchs_own_viewer_opens_what_was_taken(cuda: Cuda, tmp_path: Path):
    from torch.cuda import _memory_viz

    path = tmp_path / "snapshot.pickle"
    with pytest.raises(torch.OutOfMemoryError), oomguard.guard(snapshot=path):
        cuda.refuse()
    whole = pickle.loads(path.read_bytes())
    assert "total_reserved: 21.3GiB" in _memory_viz.segsum(whole)
    flames: list[str] = []
    _memory_viz.memory(whole, flames.append)
    _memory_viz.segments(whole, flames.append)
    assert "extract.py:12:main;model.py:41:load_weights" in flames[0]
    assert "Active Memory Timeline" in _memory_viz.trace_plot(whole)
    assert "raise OutOfMemoryError # 1.5GiB requested, 380.0MiB free in CUDA" in _memory_viz.trace(
        whole
    )


@pytest.mark.parametrize("given", [3, True, b"snapshot.pickle", 0.5])
def test_what_is_no_path_is_a_mistake_too(given: object):
    with pytest.raises(SettingError, match="is not a path"):
        oomguard.guard(snapshot=given)  # type: ignore[call-overload]
