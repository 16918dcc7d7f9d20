"""Messages of programs that oomguard was not built for: a failure is found with its kind and its figures, anything else is not."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import pytest

from oomguard.diagnosing import default_rules
from oomguard.observe.scan import scan
from oomguard.observe.source import Line

DATA = Path(__file__).parents[2] / "benchmarks/data/other_programs.toml"


@cache
def texts() -> list[dict]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))["text"]


def incidents_of(log: str):
    lines = [Line(number, 0, text) for number, text in enumerate(log.split("\n"), 1)]
    return [one for one in scan(lines, default_rules(), new_wordings=True).incidents if one.is_oom]


def texts_with(kind: bool) -> list[int]:
    return [number for number, text in enumerate(texts()) if ("kind" in text) is kind]


@pytest.mark.parametrize("number", texts_with(kind=True))
def test_a_failure_is_found_with_its_kind_and_its_figures(number: int):
    text = texts()[number]
    found = incidents_of(text["log"])

    assert found
    assert text["kind"] == "other" or text["kind"] in {one.kind for one in found}
    for name, value in text.get("facts", {}).items():
        assert any(one.number(name) == pytest.approx(value, abs=2, rel=1e-6) for one in found), name


def test_what_is_no_failure_is_found_as_none():
    false = [texts()[number]["log"] for number in texts_with(kind=False) if incidents_of(texts()[number]["log"])]

    assert false == []
