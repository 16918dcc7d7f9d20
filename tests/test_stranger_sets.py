"""What testers wrote of vLLM configurations is whole: files, models, causes and settings that the benchmarks read."""

from __future__ import annotations

import re

import pytest

from oomguard.rules.load import load_rules
from oomguard.settings import SETTINGS
from support import stranger_judge as judge
from support.stranger_case import DATA, make_folder, read_cases, read_models, read_reading

SIZES = {
    "strangers_40": 40,
    "strangers_20": 20,
    "guarded_24": 24,
    "guarded_second": 24,
    "strangers_third": 20,
    "strangers_fourth": 20,
    "strangers_fifth": 20,
    "strangers_eighth": 20,
    "strangers_ninth": 20,
    "guarded_third": 24,
    "guarded_sixth": 24,
}
CASES = [case for name in SIZES for case in read_cases(name)]
each_set = pytest.mark.parametrize("name", SIZES)


@each_set
def test_cases_of_different_names_and_ports(name):
    cases = read_cases(name)
    ports = [case["port"] for case in cases if case["port"]]

    assert len({case["name"] for case in cases}) == len(cases) == SIZES[name]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_files_that_a_command_names_are_there(case, tmp_path):
    made_by_it = {case["healthy"].get("file")}
    make_folder(case | {"models": {}}, tmp_path / "work")

    named = {word for word in case["command"] if re.search(r"\.(py|ya?ml|jsonl?|sh)$", word)} - made_by_it
    assert all((tmp_path / "work" / word).is_file() for word in named), named
    assert set(case["models"].values()) <= set(read_models(case["set"]))


@each_set
def test_every_file_and_model_belongs_to_a_case(name):
    cases = {case["name"]: case for case in read_cases(name)}

    assert {path.name for path in (DATA / name / "files").iterdir()} <= set(cases)
    assert set(read_models(name)) == {model for case in cases.values() for model in case["models"].values()}


@each_set
def test_no_data_names_a_place_on_the_testers_machine(name):
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (DATA / name).rglob("*") if path.is_file()]

    assert not [found for text in texts for found in re.findall(r"(?<![\w.])/(?:home|root|work|tmp|Users)\b", text)]


@each_set
def test_every_case_has_its_causes_and_the_rules_know_them(name):
    known, causes = {rule.cause for rule in load_rules().rules}, read_reading(name)["causes"]

    assert set(causes) == {case["name"] for case in read_cases(name)}
    assert {cause for right in causes.values() for cause in right} <= known


@each_set
def test_every_setting_that_is_judged_is_one_of_oomguard(name):
    cases, reading = read_cases(name), read_reading(name)
    texts = {text for case in cases for text in case["must_not_change"]}
    judged = {setting for case in cases for setting in judge.judged(case, reading)}
    read = reading["must_not_change"]

    assert judged <= set(SETTINGS)
    assert texts - set(read) <= set(SETTINGS)
    assert set(read) <= texts
    assert {row["setting"] for row in read.values() if "setting" in row} <= set(SETTINGS)
    assert not {text for text, row in read.items() if "no_setting" in row} & set(SETTINGS)
