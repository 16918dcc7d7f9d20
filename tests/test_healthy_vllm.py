"""The tester's 50 healthy starts are whole; `python benchmarks/vllm_healthy.py` runs them."""

from __future__ import annotations

import re

import pytest

from support.stranger_case import DATA, make_folder, read_cases, read_models
from vllm_healthy import interventions

NAME = "healthy_50"
CASES = {case["name"]: case for case in read_cases(NAME)}
QUIET = {"runs": True, "relaunches": 0, "patches": [], "own_lines": [], "left": 0, "status": 0}


def test_fifty_cases_of_different_names_and_ports_with_no_permission():
    ports = [case["port"] for case in CASES.values() if case["port"]]

    assert len(CASES) == len(read_cases(NAME)) == 50
    assert len(set(ports)) == len(ports)
    assert not any(case["allow"] for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_its_folder_can_be_made(name, tmp_path):
    make_folder(CASES[name], tmp_path / "work")

    assert all((tmp_path / "work" / model / "config.json").is_file() for model in CASES[name]["models"])


def test_every_file_and_model_belongs_to_a_case():
    assert {path.name for path in (DATA / NAME / "files").iterdir()} <= set(CASES)
    assert {model for case in CASES.values() for model in case["models"].values()} <= set(read_models(NAME))


def test_no_data_names_a_place_on_the_testers_machine():
    texts = [path.read_text(encoding="utf-8") for path in (DATA / NAME).rglob("*") if path.is_file()]

    assert not [found for text in texts for found in re.findall(r"(?<![\w.])/(?:home|root|work|Users)\b", text)]


@pytest.mark.parametrize(
    ("seen", "count"),
    [
        ({}, 0),
        ({"relaunches": 1}, 1),
        ({"patches": [{"setting": "max_model_len"}]}, 1),
        ({"own_lines": ["oomguard: running again"]}, 1),
        ({"left": 2}, 1),
    ],
)
def test_whatever_is_not_silence_is_an_intervention(seen, count):
    assert len(interventions({}, QUIET | seen)) == count
