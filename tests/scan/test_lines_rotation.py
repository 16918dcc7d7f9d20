"""A line of a container that a rotation cut in two is told once, whole, by the log in which it began."""

import gzip

import pytest

from oomguard.diagnosis import diagnose_stream
from oomguard.scan.source import open_log
from tests.scan.runtime_logs import FAILURE, HEALTHY, pieces_of, tagged

PIECES = pieces_of(FAILURE, 60)


def write(folder, logs):
    for name, lines in logs.items():
        data = "".join(lines).encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def told(folder, name):
    path = str(folder / name)
    with open_log(path) as stream:
        return [
            (one.kind, one.plan, one.location.line)
            for one in diagnose_stream(stream, path).incidents
        ]


@pytest.mark.parametrize("at", range(1, len(PIECES)))
def test_a_failure_cut_anywhere_by_a_rotation_is_told_once(tmp_path, at):
    write(
        tmp_path,
        {"0.log.20251125-051400": PIECES[:at], "0.log": [*PIECES[at:], *tagged(HEALTHY, "stdout")]},
    )
    found = [one for name in ("0.log.20251125-051400", "0.log") for one in told(tmp_path, name)]
    assert [(kind, plan[0].new) for kind, plan, _line in found] == [
        ("kv_cache_too_small_for_max_len", 1792)
    ]


def message(lines):
    return next(n for n, line in enumerate(lines) if "To serve at least" in line)


@pytest.mark.parametrize(
    "names",
    [
        ("0.log.20251125-051400.gz", "0.log.20251125-051500"),
        ("0.log.20251125-051400.gz", "0.log.20251125-051500.gz"),
    ],
    ids=["one", "both"],
)
def test_packed_logs_too(tmp_path, names):
    at = message(PIECES) + 1
    write(tmp_path, {names[0]: PIECES[:at], names[1]: PIECES[at:], "0.log": tagged(HEALTHY)})
    kinds = [[kind for kind, _plan, _line in told(tmp_path, name)] for name in (*names, "0.log")]
    assert kinds == [["kv_cache_too_small_for_max_len"], [], []]


def test_another_start_of_the_container_does_not_go_on_with_it(tmp_path):
    at = message(PIECES) + 1
    write(tmp_path, {"0.log": PIECES[:at], "1.log": tagged(FAILURE)})
    assert [kind for kind, _plan, _line in told(tmp_path, "1.log")] == [
        "kv_cache_too_small_for_max_len"
    ]


def test_log_without_its_neighbour_is_read_alone(tmp_path):
    at = message(PIECES) + 1
    write(tmp_path, {"0.log": PIECES[at:] + tagged(FAILURE)})
    (tmp_path / "0.log.20251125-051400.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    assert "kv_cache_too_small_for_max_len" in [
        kind for kind, _plan, _line in told(tmp_path, "0.log")
    ]


def test_a_link_leads_to_the_logs_beside_its_file(tmp_path):
    at = message(PIECES) + 1
    (tmp_path / "pods").mkdir()
    write(tmp_path / "pods", {"0.log.20251125-051400": PIECES[:at], "0.log": PIECES[at:]})
    (tmp_path / "llm_prod_engine-1.log").symlink_to(tmp_path / "pods" / "0.log")
    assert told(tmp_path, "llm_prod_engine-1.log") == []
