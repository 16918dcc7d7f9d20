"""Which model's files a diagnosis reads, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomguard.core.facts import GIB
from oomguard.diagnosis import diagnose

CONFIG = json.loads(
    (Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json").read_text()
)


def start(model: object, *, framework: str = "EngineCore") -> str:
    return (
        f"(APIServer pid=3) INFO 03-03 09:00:00 [utils.py:328] non-default args: {{'model': '{model}', 'max_model_len': 4096, "
        "'gpu_memory_utilization': 0.8}\n"
        f"({framework} pid=4) ValueError: Free memory on device (12.50/47.4 GiB) on startup is less than desired GPU memory "
        "utilization (0.8, 37.92 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
    )


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tuned"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_the_folder_that_the_log_names_is_read_and_noted(folder):
    diagnosis = diagnose(start(folder))
    (incident,) = diagnosis.incidents

    assert any(str(folder) in note for note in diagnosis.notes)
    weights = incident.facts["estimated_weights_bytes"]
    assert weights.source == "config"
    assert 14 * GIB < weights.value < 16 * GIB
    assert all(
        patch.setting != "gpu_memory_utilization" for patch in incident.plan
    )  # 12.5 GiB do not hold them
    assert (
        next(patch.new for patch in incident.plan if patch.setting == "tensor_parallel_size") >= 2
    )


@pytest.mark.parametrize("named", ["no/such", "tuned", "/no/such/folder", "/" + 300 * "x"])
def test_nothing_else_is_read_because_a_log_names_it(named, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    diagnosis = diagnose(start(named))

    assert diagnosis.notes == ()
    assert "estimated_weights_bytes" not in diagnosis.incidents[0].facts


def test_a_model_of_another_name_than_the_log_s_is_noted(folder):
    diagnosis = diagnose(start("org/other-8b"), model=str(folder))

    assert [note for note in diagnosis.notes if "org/other-8b" in note and str(folder) in note]
    assert diagnosis.incidents[0].facts["estimated_weights_bytes"].source == "config"
    assert diagnose(start("org/Tuned"), model=str(folder)).notes == ()
    assert diagnose(start("org/Tuned"), model=str(folder / "config.json")).notes == ()
