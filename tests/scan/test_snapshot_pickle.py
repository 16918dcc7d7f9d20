"""A pickle is read only where it is plain data: nothing in it runs, and no claim of a size fills the machine."""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.scan import snapshot
from oomguard.scan.inputs import is_pickle
from oomguard.scan.snapshot import (
    CutOffError,
    RefusedError,
    check_pickle,
    load_pickle,
    summarize,
    without_collections,
)
from support.hostile_pickles import hostile_pickles
from support.made_snapshots import example

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=30,
)
KINDS = sorted(hostile_pickles(Path("marker")))


def test_there_are_twenty_kinds():
    assert len(KINDS) == 20


def test_hostile_pickle_runs_nothing_and_its_import_is_named(
    tmp_path: Path,
):
    marker = tmp_path / "marker"
    for kind, content in hostile_pickles(marker).items():
        assert is_pickle(content[:512]), kind
        with pytest.raises(RefusedError) as caught:
            summarize(load_pickle(content))
        assert not marker.exists(), kind
        if kind.split()[0] in {"REDUCE", "GLOBAL", "INST", "OBJ", "STACK_GLOBAL"}:
            wanted = re.search(
                r"would import (os|posix|builtins)\.(system|exec)", str(caught.value)
            )
            assert wanted, f"{kind}: {caught.value}"


def test_hostile_pickles_would_run_under_plain_pickle(tmp_path: Path):
    marker = tmp_path / "marker"
    pickle.loads(hostile_pickles(marker)["REDUCE of os.system, protocol 5"])
    assert marker.exists()


@given(PLAIN, st.integers(2, 5))
def test_plain_data_is_read_as_pickle_reads_it(value: object, protocol: int):
    assert load_pickle(pickle.dumps({"value": value}, protocol)) == {"value": value}


@given(st.data())
def test_damaged_snapshot_is_read_or_refused_cleanly(data: st.DataObject):
    content = bytearray(pickle.dumps(example().in_pieces(), 4)[:6000])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(2, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content += data.draw(st.sampled_from([b"", b".", b"ue.", b"\x93R."]))
    with contextlib.suppress(RefusedError):
        summarize(load_pickle(bytes(content)))


@given(PLAIN)
def test_any_plain_data_is_a_snapshot_or_refused(value: object):
    for raw in (
        value,
        {"segments": value},
        {"segments": [{"blocks": [{"size": 512, "state": value}]}], "device_traces": value},
    ):
        with contextlib.suppress(RefusedError):
            summarize(raw)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x04", "it is truncated"),
        (b"\x80\x04}\x8c", "it is truncated"),
        (b"\x80\x04}X\xff\xff\xff\xff.", "it is truncated"),
        (b"\x80\x04u.", "damaged"),
        (b"\x80\x04h\x05.", "damaged"),
        (b"\x80\x04}]K\x01s.", "damaged"),
        (b"\x80\x04}\x8c\x01\xffK\x01s.", "damaged"),
        (b"\x80\x09.", "protocol is 9"),
        (b"\x80\x04\x00", "not an instruction"),
        (b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.", "damaged"),
    ],
)
def test_a_damaged_pickle_is_refused_with_its_reason(content: bytes, reason: str):
    with pytest.raises(RefusedError, match=reason):
        load_pickle(content)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_snapshot_that_is_cut_anywhere_is_told_as_cut_off(protocol: int):
    made = example().Recorder()
    made.segment(
        [
            (2**21, "active_allocated", example().stack(("/job/a.py", 1, "f"))),
            (2**20, "inactive", []),
        ],
        pool=(0, 70_000),
    )
    content = pickle.dumps({**made.snapshot(), "ratio": 0.5}, protocol)
    for size in range(2, len(content)):
        with pytest.raises(CutOffError):
            check_pickle(content[:size])
    check_pickle(content)


def test_lists_nested_a_million_deep_are_no_snapshot(monkeypatch: pytest.MonkeyPatch):
    deep = b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b"."
    with pytest.raises(RefusedError, match="no segments"):
        summarize(load_pickle(deep))
    monkeypatch.setattr(snapshot, "MOST_CONTAINERS", 999_999)
    with pytest.raises(RefusedError, match="more than 999,999"):
        load_pickle(deep)


def test_file_beyond_the_limit_is_refused_before_reading(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(snapshot, "MOST_PICKLE_BYTES", 100)
    with pytest.raises(RefusedError, match="more than"):
        load_pickle(pickle.dumps(example().in_pieces()))


def test_a_log_is_no_pickle():
    for text in [
        b"",
        b"cuda\ntorch\n(EngineCore pid=1) out of memory\n",
        b"(default) INFO\n",
        b"compiling\nmodel\n[INFO] x\n",
        b"]q\n[0m",
        b"\xe2\x82\xac",
    ]:
        assert not is_pickle(text) or text.startswith(b"]q"), text


def test_the_collector_is_as_it_was_after_a_refusal():
    assert gc.isenabled()
    with pytest.raises(RefusedError), without_collections():
        assert not gc.isenabled()
        load_pickle(b"\x80\x04")
    assert gc.isenabled()


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_old_pickle_of_plain_data_is_accused_of_nothing(protocol: int):
    """Texts in it hold what would be instructions elsewhere."""
    with pytest.raises(RefusedError) as caught:
        check_pickle(
            pickle.dumps(
                {"segments": ["active_allocated", "device\nstep\nstop"], "c": "icache\nx\n"},
                protocol,
            )
        )
    assert "import" not in str(caught.value)
    assert str(caught.value).endswith("does not write: it writes 2 and newer; dump it again")
