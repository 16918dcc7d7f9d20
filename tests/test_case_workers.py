"""The processes that run a benchmark's cases: one that dies, fails or does not end takes its own case with it and no other."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.case_workers import run_cases

DIES, FAILS, HANGS = 1, 2, 3
PIDS = "pid"


def run_case(case):
    number, _ = case
    if number == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == FAILS:
        raise ValueError("of this case alone")
    if number == HANGS:
        time.sleep(600)
    return {"number": number, "oomguard": (1, 4), PIDS: os.getpid()}


def found(numbers, **options):
    return {
        case["number"]: case
        for case in run_cases(run_case, [(number, 0) for number in numbers], **options)
    }


def ends():
    raise SystemExit(3)


def test_every_case_is_reported_if_one_dies_fails_or_hangs():
    told = found(range(6), workers=2, case_limit_s=2)

    assert sorted(told) == [0, 1, 2, 3, 4, 5]
    assert {
        number: case.get("oomguard_error") for number, case in told.items() if not case["oomguard"]
    } == {
        DIES: "its process ended with status -9",
        FAILS: "ValueError: of this case alone",
        HANGS: "no result after 2 s",
    }


def test_a_process_is_replaced_after_its_number_of_cases():
    told = found([4, 5, 6, 7], workers=1, per_worker=2)

    assert [told[number][PIDS] == told[4][PIDS] for number in (5, 6, 7)] == [True, False, False]


def test_no_case_begins_once_the_minutes_are_over():
    assert found(range(4, 10), workers=1, minutes=0) == {}


def test_processes_that_cannot_load_end_the_benchmark():
    with pytest.raises(RuntimeError, match="before its first case"):
        found([4, 5], workers=2, load=ends)
