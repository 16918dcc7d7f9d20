"""What is kept of a command's output, and that its diagnosis is that of a file of the same bytes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.analyst.output import replay
from oomguard.rules.rule_files import load_rules
from oomguard.scan.anchors import finder, skim
from oomguard.scan.scan import scan
from oomguard.supervisor import output_buffer as module
from oomguard.supervisor.output_buffer import DroppedOutput, OutputBuffer, RecordedOutput
from support.each import each

RULES = load_rules()
HEALTHY = b"INFO 11-22 06:40:43 [loggers.py:127] Engine 000: Avg prompt throughput: 12.1 tokens/s, running 3 reqs\n"
FAILURE = (
    b"Traceback (most recent call last):\n"
    b'  File "serve.py", line 7, in <module>\n'
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.52 GiB of which "
    b"1.12 GiB is free. Process 1 has 22.40 GiB memory in use.\n"
)


def anchors():
    return finder(RULES.anchors)


@pytest.fixture
def small(monkeypatch):
    """Slots of 4 KiB, of which two are the head and twelve the end."""
    monkeypatch.setattr(module, "SLOT_BYTES", 4096)
    monkeypatch.setattr(module, "HEAD_SLOTS", 2)
    monkeypatch.setattr(module, "CAP_BYTES", 14 * 4096)


def recorded(chunks) -> OutputBuffer:
    found = OutputBuffer()
    for stream, data in chunks:
        found.write(stream, memoryview(data))
    return found


def told(diagnosis):
    return [
        (i.kind, i.location.line, i.location.byte, i.evidence[0].text) for i in diagnosis.incidents
    ]


def as_a_file(data: bytes):
    import io

    return told(scan(skim(io.BytesIO(data), anchors), RULES))


def as_recorded(recording: RecordedOutput):
    return told(replay(recording, RULES, anchors).diagnosis())


@each("before", [0, 1, 50, 3000, 30000])
@each("after", [0, 3000])
def test_failure_is_found_at_its_place_among_equal_bytes(before, after):
    data = HEALTHY * before + FAILURE + HEALTHY * after
    recording = recorded([(1, data[i : i + 65536]) for i in range(0, len(data), 65536)])

    assert as_recorded(recording) == as_a_file(data)
    assert len(as_recorded(recording)) == 1


@pytest.mark.parametrize("before", [700, 2000])
def test_failure_keeps_its_line_and_byte_in_trimmed_output(before, small):
    data = HEALTHY * before + FAILURE + HEALTHY * 200
    recording = recorded([(1, data[i : i + 1000]) for i in range(0, len(data), 1000)])

    assert recording.size <= module.CAP_BYTES < len(data)
    assert as_recorded(recording) == as_a_file(data)


def test_the_beginning_and_the_end_are_kept(small):
    data = b"".join(HEALTHY.replace(b"12.1", b"%d.1" % n) for n in range(2000))
    recording = recorded([(1, data)])

    kept = recording.kept()
    assert recording.size <= module.CAP_BYTES
    assert b"".join(recording.read(part)[1] for part in kept[:2]) == data[: 2 * 4096]
    assert recording.tail(1, 4096) == data[-4096:]


def test_the_newest_failure_is_kept_however_many_there_were(small):
    data = b"".join(HEALTHY * 100 + FAILURE.replace(b"2.00", b"%d.00" % n) for n in range(3, 60))
    recording = recorded([(1, data[i : i + 1000]) for i in range(0, len(data), 1000)])

    assert "59.00 GiB" in as_recorded(recording)[-1][3]


def test_another_process_reads_the_same_from_the_index(small):
    import json

    data = HEALTHY * 700 + FAILURE + HEALTHY * 10
    recording = recorded([(1 + i % 2, data[i : i + 1001]) for i in range(0, len(data), 1001)])
    read = RecordedOutput.from_index(
        os.dup(recording.fd), json.loads(json.dumps(recording.index()))
    )

    assert as_recorded(read) == as_recorded(recording)
    assert [read.tail(n, 9000) for n in (1, 2)] == [recording.tail(n, 9000) for n in (1, 2)]
    assert (read.came, read.size) == (len(data), recording.size)


def test_the_next_attempt_begins_with_nothing(small):
    recording = recorded([(1, FAILURE * 500)])
    recording.forget()
    recording.write(1, memoryview(HEALTHY))

    assert (recording.came, recording.size) == (len(HEALTHY), len(HEALTHY))
    assert as_recorded(recording) == []


def test_what_is_kept_can_be_written_for_its_user_alone(small, tmp_path):
    data = HEALTHY * 700 + FAILURE
    recording = recorded([(1, data)])
    recording.copy_to(str(tmp_path / "output.log"))

    written = (tmp_path / "output.log").read_bytes()
    assert written.startswith(HEALTHY * 10)
    assert written.endswith(FAILURE)
    assert b" bytes are missing here]" in written
    assert (tmp_path / "output.log").stat().st_mode & 0o777 == 0o600


def test_two_streams_are_read_in_the_order_in_which_they_came():
    start = b"INFO 11-22 06:40:43 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'\n"
    chunks = [(1, start), (2, FAILURE), (1, start.replace(b"0.32.0", b"0.33.0"))]
    found = replay(recorded(chunks), RULES, anchors).diagnosis().incidents

    assert [(i.framework_version, i.location.line) for i in found] == [("0.32.0", 3)]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=9000)), max_size=20)
)
def test_no_byte_is_kept_twice_changed_or_out_of_order(chunks):
    before = {name: getattr(module, name) for name in ("SLOT_BYTES", "HEAD_SLOTS", "CAP_BYTES")}
    try:
        module.SLOT_BYTES, module.HEAD_SLOTS, module.CAP_BYTES = 4096, 2, 14 * 4096
        recording = recorded(chunks)
        whole = {n: b"".join(data for stream, data in chunks if stream == n) for n in (1, 2)}
        at, came = {1: 0, 2: 0}, 0
        for part in recording.kept():
            if isinstance(part, DroppedOutput):
                for stream, size in part.sizes.items():
                    at[stream] += size
                continue
            for stream, data in recording.read(part).items():
                assert whole[stream][at[stream] : at[stream] + len(data)] == data
                at[stream] += len(data)
                came += len(data)
        assert {n: len(data) for n, data in whole.items()} == at
        assert came == recording.size <= module.CAP_BYTES
    finally:
        recording.close()
        for name, value in before.items():
            setattr(module, name, value)


def test_a_pipe_s_bytes_go_into_the_copy_and_out_of_the_pipe():
    recording = OutputBuffer()
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    recording.take(1, reader, 8)

    assert recording.read(recording.kept()[0]) == {1: b"one\ntwo\n"}
    os.close(writer)
    assert os.read(reader, 10) == b""
    os.close(reader)
    recording.close()


def test_unwritable_copy_still_takes_the_bytes(monkeypatch):
    recording = OutputBuffer()

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "splice", full)
    reader, writer = os.pipe()
    os.write(writer, b"lost")
    recording.take(1, reader, 4)
    os.close(writer)

    assert recording.failed == "No space left on device"
    assert os.read(reader, 4) == b""
    os.close(reader)
    recording.close()


@pytest.mark.parametrize("full_at", [3, 5, 9])
def test_on_a_full_disk_the_beginning_and_the_end_are_kept(full_at, small, monkeypatch):
    real = os.pwrite

    def pwrite(fd, data, at):
        if at + len(data) > full_at * 4096:
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = HEALTHY * 1000 + FAILURE
    recording = recorded([(1, data[i : i + 512]) for i in range(0, len(data), 512)])

    assert recording.failed is None
    assert recording.size <= full_at * 4096
    assert recording.tail(1, len(FAILURE)) == FAILURE
    assert recording.read(recording.kept()[0])[1] == data[:4096]
    assert as_recorded(recording)[0][2] == as_a_file(data)[0][2]


def test_on_a_disk_that_takes_nothing_nothing_is_recorded(small, monkeypatch):
    def pwrite(_fd, _data, _at):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    recording = recorded([(1, FAILURE)])

    assert recording.failed == "No space left on device"
    assert recording.size == 0
