from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.fleet import last_moment, moment_of

WRITTEN = datetime.datetime(2026, 11, 26, 12, tzinfo=datetime.UTC).timestamp()


def local(*parts: int) -> float:
    return datetime.datetime(*parts).timestamp()


def utc(*parts: int) -> float:
    return datetime.datetime(*parts, tzinfo=datetime.UTC).timestamp()


def test_a_stamp_is_read_as_its_writer_meant_it():
    for line, at in [
        (
            "2026-11-20T10:00:00.500000000Z stderr F RuntimeError: CUDA out of memory.",
            utc(2026, 11, 20, 10) + 0.5,
        ),
        (
            '{"log":"CUDA out of memory\\n","stream":"stderr","time":"2026-11-20T10:00:00.5Z"}',
            utc(2026, 11, 20, 10) + 0.5,
        ),
        ("2026-11-20T10:00:00+0200 host engine[7]: x", utc(2026, 11, 20, 8)),
        ("[2026-11-20 10:00:00 TP0] x", local(2026, 11, 20, 10)),
        ("2026-11-20 10:00:00,250 - ERROR - x", local(2026, 11, 20, 10) + 0.25),
        ("(EngineCore pid=3) ERROR 11-20 10:00:00 [core.py:842] x", local(2026, 11, 20, 10)),
        ("INFO 12-24 10:00:00 [core.py:842] x", local(2025, 12, 24, 10)),
        ("E1120 10:00:00.123456 7 file.cc:12] x", local(2026, 11, 20, 10)),
        ("Nov 20 10:00:00 host kernel: Out of memory: Killed process 7", local(2026, 11, 20, 10)),
        (
            '{"_PID":"7","__REALTIME_TIMESTAMP" : "1795598092500000","MESSAGE":"ERROR 11-20 10:00:00 [x]"}',
            1795598092.5,
        ),
        ("__REALTIME_TIMESTAMP=1795598092500000", 1795598092.5),
        ("__REALTIME_TIMESTAMP=x", None),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", None),
        ("ERROR 13-40 10:00:00 [core.py:1] x", None),
        ("version 12026-11-20T10:00:00", None),
    ]:
        assert moment_of(line, WRITTEN) == at, (line, at)


def test_year_of_a_stamp_is_not_guessed_without_a_file_time():
    assert moment_of("INFO 11-20 10:00:00 [core.py:842] x", None) is None


def test_the_last_stamped_line_counts():
    lines = ["2026-11-20T10:00:00Z a", "2026-11-20T11:00:00Z b", "  File x"]
    assert last_moment(lines, None) == utc(2026, 11, 20, 11)


@given(
    st.datetimes(datetime.datetime(2001, 1, 1), datetime.datetime(2090, 1, 1)).map(
        lambda when: when.replace(microsecond=0)
    )
)
def test_a_stamp_with_a_zone_is_read_back_as_it_was_written(when: datetime.datetime):
    at = when.replace(tzinfo=datetime.UTC)
    assert moment_of(f"x {at.isoformat()} y", None) == at.timestamp()


@given(st.text(max_size=80), st.one_of(st.none(), st.floats(0, 4e9)))
def test_no_line_is_too_strange(line: str, written: float | None):
    found = moment_of(line, written)
    assert found is None or isinstance(found, float)
