"""A log of another model of the same size: its tokens tell, where its weights do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomguard.core.errors import SettingError
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.calibration import refuse_other_start, settings_of_start
from oomguard.planning.start import start_of_log

EXAMPLES = Path(__file__).parents[3] / "examples"
START = start_of_log(str(EXAMPLES / "logs" / "vllm_0.12.0_start_worked.log"))
OWN = settings_of_start(START)
CONFIG = EXAMPLES / "models" / "llama-3.1-8b.json"


def test_a_start_of_the_model_is_taken():
    refuse_other_start(START, OWN, read_model(find_model(str(CONFIG))), "start.log")


def test_start_of_another_model_is_refused_by_its_tokens(tmp_path):
    other = {
        **json.loads(CONFIG.read_text()),
        "num_key_value_heads": 16,
        "intermediate_size": 13_000,
    }
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(SettingError, match=r"40,128 tokens in 4\.90 GiB; this model: 20,0"):
        refuse_other_start(START, OWN, read_model(find_model(str(tmp_path))), "start.log")
