"""The dashboard in examples/grafana asks for what is exported, in expressions that Prometheus reads."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oomguard.telemetry.metrics import metrics

FILE = Path(__file__).parents[2] / "examples" / "grafana" / "oomguard.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPORTED = {metric.name: set(metric.labels) for metric in metrics()}
OF_PROMETHEUS = {"job", "instance"}
# What may stand in an expression beside names of metrics.
WORDS = {"by", "sum", "time"}


def names(expression: str) -> set[str]:
    """The names in an expression, without selectors, groupings and words of the language."""
    bare = re.sub(r"\{[^}]*\}|\bby \([^)]*\)", "", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS


def test_an_expression_names_exported_metrics_and_their_labels_only():
    for expression in EXPRESSIONS:
        assert names(expression), expression
        assert names(expression) <= set(EXPORTED), expression
        labels = OF_PROMETHEUS.union(*(EXPORTED[name] for name in names(expression)))
        assert set(re.findall(r"(\w+)=~", expression)) <= labels, expression
        grouped = re.findall(r"\bby \(([^)]*)\)", expression)
        assert {label.strip() for group in grouped for label in group.split(",")} <= labels, expression


def test_every_exported_metric_has_a_place_on_it():
    assert set().union(*map(names, EXPRESSIONS)) == set(EXPORTED)


def test_a_legend_names_labels_that_the_metric_has():
    for panel in PANELS:
        for target in panel["targets"]:
            labels = OF_PROMETHEUS.union(*(EXPORTED[name] for name in names(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


def test_variables_are_defined_and_asked_of_exported_metrics():
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used == set(VARIABLES)
    for variable in VARIABLES.values():
        assert set(re.findall(r"label_values\((\w+)", str(variable["query"]))) <= set(EXPORTED)


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)  # the columns of Grafana's grid
    for one, other in itertools.combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_promtool_reads_every_expression(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: it comes with Prometheus (Debian: prometheus)")
    rules = [{"record": f"panel:{number}", "expr": text.replace("$", "")} for number, text in enumerate(EXPRESSIONS)]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    command = [promtool, "check", "rules", "--lint=none", str(tmp_path / "rules.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"{len(rules)} rules found" in ran.stdout
