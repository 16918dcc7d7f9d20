"""A measured start stands in for the priors: the plan of the same start is then the start itself, and it is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from oomguard.core.errors import ConfigError, InputError, SettingError
from oomguard.core.facts import GIB
from oomguard.core.incident import SettingInForce
from oomguard.diagnosis import diagnose
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.calibration import (
    Calibrations,
    apply_calibration,
    correction_of,
    measured_start,
    settings_of_start,
)
from oomguard.estimate.start.start_budget import budget_start

LOG = Path(__file__).parents[3] / "examples" / "logs" / "vllm_0.12.0_start_worked.log"
CONFIG = json.loads(
    (Path(__file__).parents[3] / "examples" / "models" / "llama-3.1-8b.json").read_text()
)


@pytest.fixture(scope="module")
def model():
    return read_model(ModelFiles("an 8B", "config.json", CONFIG, None))


@pytest.fixture(scope="module")
def start():
    return measured_start(diagnose(LOG).starts)


@pytest.fixture(scope="module")
def correction(model, start):
    return correction_of(start, model, "that log")


def test_the_plan_of_the_measured_start_is_that_start(model, start, correction):
    plan = budget_start(model, replace(settings_of_start(start), correction=correction))
    printed = {name: fact.value for name, fact in start.facts.items()}
    assert plan.kv_cache_pool_bytes == printed["kv_cache_available_bytes"]
    assert plan.kv_cache_tokens == printed["kv_cache_capacity_tokens"]
    assert round(plan.max_concurrency, 2) == printed["max_concurrency"]
    assert plan.weights_bytes == printed["model_weights_bytes"]
    assert plan.peak_activation_bytes == printed["peak_activation_bytes"]
    assert plan.cudagraph_bytes == printed["cudagraph_bytes"]


def test_what_the_figures_leave_open_is_all_that_is_uncertain(model, start, correction):
    measured = budget_start(model, replace(settings_of_start(start), correction=correction))
    prior = budget_start(model, settings_of_start(start))
    assert 0 < measured.uncertainty_bytes <= 0.02 * GIB < prior.uncertainty_bytes


def test_another_utilization_adds_its_share_of_the_device(model, start, correction):
    at = replace(settings_of_start(start), correction=correction)
    more = budget_start(model, replace(at, gpu_memory_utilization=0.95)).kv_cache_pool_bytes
    assert more - budget_start(model, at).kv_cache_pool_bytes == pytest.approx(
        0.05 * at.gpu_total_bytes, abs=2
    )


def test_correction_is_found_for_the_same_engine_gpu_and_model(tmp_path, model, start, correction):
    kept = Calibrations(tmp_path / "state" / "calibrations.json")
    settings = settings_of_start(start)
    assert kept.find(model, settings) is None
    kept.keep(model, settings, correction)
    kept.keep(model, settings, replace(correction, source="a later log"))

    again = Calibrations(kept.path)
    assert (
        again.find(model, replace(settings, gpu_total_bytes=24 * GIB, max_model_len=100)).source
        == "a later log"
    )
    assert again.find(model, replace(settings, gpu_total_bytes=48 * GIB)) is None
    assert again.find(model, replace(settings, tensor_parallel_size=2)) is None
    assert again.find(model, replace(settings, version=type(settings.version)("0.13"))) is None
    other = read_model(
        ModelFiles("another", "config.json", {**CONFIG, "num_hidden_layers": 16}, None)
    )
    assert again.find(other, settings) is None


def test_a_spoiled_file_is_named(subtests, tmp_path, model, start):
    for text in [
        "{",
        "[]",
        '{"schema": 2, "calibrations": []}',
        '{"schema": 1, "calibrations": [1]}',
        json.dumps(
            {
                "schema": 1,
                "calibrations": [
                    {
                        "of": {"gpu_total_bytes": 1},
                        "correction": {"source": "x", "weights_bytes": "1"},
                    }
                ],
            }
        ),
    ]:
        with subtests.test(text=text):
            path = tmp_path / "calibrations.json"
            path.write_text(text)
            with pytest.raises(ConfigError, match="calibrations"):
                Calibrations(path).find(model, settings_of_start(start))


def test_start_with_other_ranks_is_not_used_for_these(tmp_path, model, start):
    kept = Calibrations(tmp_path / "calibrations.json")
    settings = settings_of_start(start)
    with pytest.raises(SettingError, match="tensor_parallel_size"):
        apply_calibration(
            start, "a.log", replace(settings, tensor_parallel_size=2), kept, lambda _d, _q: model
        )
    assert kept.find(model, replace(settings, tensor_parallel_size=2)) is None
    assert kept.find(model, settings).source.endswith("a.log")


def test_a_start_of_another_model_is_refused(tmp_path, start):
    half = read_model(
        ModelFiles("another", "config.json", {**CONFIG, "num_hidden_layers": 16}, None)
    )
    kept = Calibrations(tmp_path / "calibrations.json")
    with pytest.raises(SettingError, match=r"different model \(14\.99 GiB"):
        apply_calibration(start, "a.log", settings_of_start(start), kept, lambda _d, _q: half)
    assert not kept.path.exists()


def test_where_the_file_cannot_be_read_the_priors_are_there(model, start):
    assert (
        Calibrations(Path("/dev/null/calibrations.json")).find(model, settings_of_start(start))
        is None
    )


def test_a_log_without_figures_is_refused():
    with pytest.raises(InputError, match="no vLLM start"):
        measured_start(diagnose("nothing happened\nat all").starts)


def test_peak_with_graphs_does_not_count_them_twice(tmp_path, model):
    """From 0.27 on a start prints weights and the rest as one sum, and its peak with the estimate of the graphs."""
    old = "1.23 GiB for peak activation, 0.16 GiB for non-torch memory, and 0.62 GiB for CUDAGraph memory"
    new = "1.85 GiB for peak activation, and 0.62 GiB for CUDAGraph memory"
    text = LOG.read_text().replace("0.12.0", "0.31.0").replace(old, new)
    text = text.replace(
        "14.99 GiB for weight,", "15.15 GiB for consumed memory (weights + non-torch),"
    )
    assert new in text
    log = tmp_path / "start.log"
    log.write_text(
        text.replace("Available KV cache memory: 4.90 GiB", "Available KV cache memory: 4.28 GiB")
    )
    start = measured_start(diagnose(log).starts)
    plan = budget_start(
        model, replace(settings_of_start(start), correction=correction_of(start, model, "that log"))
    )
    assert plan.kv_cache_pool_bytes == start.facts["kv_cache_available_bytes"].value
    assert plan.peak_activation_bytes == pytest.approx(1.23 * GIB, abs=0.01 * GIB)
    assert plan.cudagraph_bytes == pytest.approx(0.62 * GIB, abs=0.01 * GIB)
    assert plan.non_torch_bytes == pytest.approx(0.16 * GIB, abs=0.02 * GIB)


def test_what_was_measured_without_graphs_leaves_the_graphs_open(model, start):
    eager = replace(
        start,
        settings={
            **start.settings,
            "enforce_eager": SettingInForce("enforce_eager", True, True, "printed"),
        },
    )
    asked = replace(settings_of_start(start), version=Version("0.20.2"))
    found = correction_of(replace(eager, framework_version="0.20.2"), model, "an eager start")
    assert found.enforce_eager is True
    with_graphs = budget_start(model, replace(asked, correction=found))
    without = budget_start(model, replace(asked, correction=found, enforce_eager=True))
    assert without.uncertainty_bytes <= 0.02 * GIB < 0.2 * GIB < with_graphs.uncertainty_bytes


def test_what_was_measured_with_other_rows_leaves_the_peak_open(model, start, correction):
    same = replace(settings_of_start(start), correction=correction)
    other = budget_start(model, replace(same, max_num_seqs=64))
    assert other.uncertainty_bytes > budget_start(model, same).uncertainty_bytes


def test_unwritable_calibration_leaves_no_file(tmp_path, model, start, correction):
    (tmp_path / "calibrations.json").mkdir()
    with pytest.raises(InputError):
        Calibrations(tmp_path / "calibrations.json").keep(
            model, settings_of_start(start), correction
        )
    assert [path.name for path in tmp_path.iterdir()] == ["calibrations.json"]
