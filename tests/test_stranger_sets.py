"""The testers' vLLM cases are complete: files, models, causes and settings that the benchmarks read."""

from __future__ import annotations

import re

import pytest

from oomguard.core.settings import SETTINGS
from oomguard.rules.rule_files import load_rules
from support import stranger_judge as judge
from support.stranger_case import DATA, make_folder, read_cases, read_models, read_reading

SIZES = {"strangers_ninth": 20, "guarded_sixth": 24}
each_set = pytest.mark.parametrize("name", SIZES)


@each_set
def test_the_cases_have_different_names_and_ports(name):
    cases = read_cases(name)
    ports = [case["port"] for case in cases if case["port"]]

    assert len({case["name"] for case in cases}) == len(cases) == SIZES[name]
    assert len(set(ports)) == len(ports)


@each_set
def test_every_case_has_exactly_its_files_and_models(name, tmp_path):
    cases, models, missing = read_cases(name), read_models(name), {}
    for case in cases:
        folder = tmp_path / case["name"]
        make_folder(case | {"models": {}}, folder)
        named = {word for word in case["command"] if re.search(r"\.(py|ya?ml|jsonl?|sh)$", word)}
        missing[case["name"]] = [
            *(
                word
                for word in named - {case["healthy"].get("file")}
                if not (folder / word).is_file()
            ),
            *(model for model in case["models"].values() if model not in models),
        ]

    assert {case: what for case, what in missing.items() if what} == {}
    assert {path.name for path in (DATA / name / "files").iterdir()} <= set(missing)
    assert set(models) == {model for case in cases for model in case["models"].values()}


@each_set
def test_no_data_names_a_path_of_the_testers_machine(name):
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in (DATA / name).rglob("*")
        if path.is_file()
    ]

    assert not [
        found
        for text in texts
        for found in re.findall(r"(?<![\w.])/(?:home|root|work|tmp|Users)\b", text)
    ]


@each_set
def test_every_case_has_its_causes_and_the_rules_know_them(name):
    known, causes = {rule.cause for rule in load_rules().rules}, read_reading(name)["causes"]

    assert set(causes) == {case["name"] for case in read_cases(name)}
    assert {cause for right in causes.values() for cause in right} <= known


@each_set
def test_every_judged_setting_exists(name):
    cases, reading = read_cases(name), read_reading(name)
    texts = {text for case in cases for text in case["must_not_change"]}
    judged = {setting for case in cases for setting in judge.judged(case, reading)}
    read = reading["must_not_change"]

    assert judged <= set(SETTINGS)
    assert texts - set(read) <= set(SETTINGS)
    assert set(read) <= texts
    assert {row["setting"] for row in read.values() if "setting" in row} <= set(SETTINGS)
    assert not {text for text, row in read.items() if "no_setting" in row} & set(SETTINGS)
