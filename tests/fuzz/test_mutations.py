"""Spoiled logs and rule files: no exception, no search over its limit, valid JSON; FUZZ_INPUTS inputs in all.

`FUZZ_INPUTS=100000 pytest -n 2 tests/fuzz` is the run of record. Each shard has a seed of its own, so that a failure is
found again by running that shard with the same number.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000"))
LOG_SHARDS, RULE_SHARDS, FILES_AT_ONCE = 8, 2, 100
LOG_INPUTS, RULE_INPUTS = int(INPUTS * 0.8), int(INPUTS * 0.2)


def run(shard: int, count: int, check: Callable[[bytes], None]) -> None:
    @seed(shard)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.binary(max_size=24), st.integers(0, 2**64 - 1))
    def each(first: bytes, number: int) -> None:
        # Hypothesis prefers small and repeated bytes: a generated tail keeps the inputs apart, and shrinks by its number
        check(first + random.Random(number).randbytes(64))

    each()


@pytest.mark.parametrize("shard", range(LOG_SHARDS))
def test_damaged_log_is_diagnosed_in_time_as_valid_json(shard):
    from fuzz_checks import check_log
    from fuzz_inputs import log_text

    seen, with_incident = 0, 0

    def check(data: bytes) -> None:
        nonlocal seen, with_incident
        seen += 1
        with_incident += bool(check_log(log_text(data))["incidents"])

    run(shard, LOG_INPUTS // LOG_SHARDS, check)

    assert seen >= LOG_INPUTS // LOG_SHARDS
    assert with_incident > seen / 20  # else the recipes no longer reach what lies behind a match


@pytest.mark.parametrize("shard", range(RULE_SHARDS))
def test_a_spoiled_rule_file_is_used_or_refused_by_name(shard):
    from fuzz_checks import check_rule_file
    from fuzz_inputs import rule_file

    accepted = refused = 0

    with tempfile.TemporaryDirectory() as folder:

        def check(data: bytes) -> None:
            nonlocal accepted, refused
            if check_rule_file(Path(folder), rule_file(data)) is None:
                refused += 1
            else:
                accepted += 1

        run(1000 + shard, RULE_INPUTS // RULE_SHARDS, check)

    assert accepted + refused >= RULE_INPUTS // RULE_SHARDS
    assert accepted
    assert refused


def test_each_damaged_file_gets_one_line_in_order(tmp_path):
    from fuzz_checks import check_line
    from fuzz_inputs import log_bytes

    contents: list[bytes] = []
    run(2000, FILES_AT_ONCE, lambda data: contents.append(log_bytes(data)))
    paths = [tmp_path / f"{i:05d}.log" for i in range(FILES_AT_ONCE)]
    for path, content in zip(paths, contents, strict=False):
        path.write_bytes(content)

    command = [sys.executable, "-m", "oomguard", "diagnose", "--format", "json", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, timeout=120, check=False)

    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.decode("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line)["source"] for line in lines] == [str(path) for path in paths]
    for line in lines:
        check_line(line)
