"""Of the calibrations those that a run learned are told and dropped, by session or model; those that a user gave stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.diagnosis import diagnose
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.calibration import (
    Calibrations,
    correction_of,
    forget,
    learned,
    measured_start,
    settings_of_start,
)

LOG = Path(__file__).parents[3] / "examples" / "logs" / "vllm_0.12.0_start_worked.log"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def calibrations(path: Path) -> Calibrations:
    """Of three models: two that runs learned, one that a user gave."""
    kept, start = Calibrations(path), measured_start(diagnose(LOG).starts)
    for layers, origin in (
        (32, {"session": "s1", "model": "./a"}),
        (16, {"session": "s2", "model": "./b"}),
        (8, {}),
    ):
        model = read_model(
            ModelFiles("m", "config.json", {**CONFIG, "num_hidden_layers": layers}, None)
        )
        kept.keep(
            model, settings_of_start(start), correction_of(start, model, f"log of {layers}"), origin
        )
    return kept


def test_what_is_told_is_what_is_dropped(subtests, tmp_path):
    cases = [
        (None, None, ["log of 32", "log of 16"]),
        (["s2"], None, ["log of 16"]),
        (["s1", "s2"], "./a", ["log of 32"]),
        ([], None, []),
        (None, "./c", []),
    ]
    for number, (sessions, model, told) in enumerate(cases):
        with subtests.test(sessions=sessions, model=model, told=told):
            kept = calibrations(tmp_path / f"{number}.json")
            lines = learned(kept, sessions, model)
            assert [line.rpartition(" by ")[2] for line in lines] == told
            forget(kept, sessions, model)

            left = [entry["correction"]["source"] for entry in kept.entries()]
            assert left == [
                name for name in ("log of 32", "log of 16", "log of 8") if name not in told
            ]


def test_a_model_is_known_by_its_whole_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = calibrations(tmp_path / "calibrations.json")
    monkeypatch.chdir(tmp_path)
    assert len(learned(kept, None, str(tmp_path.resolve() / "a"))) == 1


def test_without_a_file_nothing_was_learned_and_none_is_made(tmp_path: Path):
    kept = Calibrations(tmp_path / "calibrations.json")
    assert learned(kept, None, None) == ()
    forget(kept, None, None)
    assert not kept.path.exists()
