"""The alert rules and the dashboard use only metrics that oomguard exports."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from oomguard.telemetry.metrics import metrics

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
METRIC = re.compile(r"\boomguard_[a-z_]+")


def expressions_of_the_alerts() -> list[str]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def expressions_of_the_dashboard() -> list[str]:
    panels = json.loads((FOLDER / "grafana_dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_alerts_and_dashboard_use_exported_metrics():
    exported = {metric.name for metric in metrics()}
    for expression in expressions_of_the_alerts() + expressions_of_the_dashboard():
        names = METRIC.findall(expression)
        assert names, expression
        assert set(names) <= exported, expression


def test_every_metric_except_the_version_is_on_the_dashboard():
    shown = set(METRIC.findall(" ".join(expressions_of_the_dashboard())))
    assert {metric.name for metric in metrics()} - shown == {"oomguard_build_info"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts():
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yml"], check=True)
