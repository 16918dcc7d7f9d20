"""A configuration is a stranger's: whatever code it names, none is loaded, and nobody is asked whether it may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.estimate.model.parameters import auto_config

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
CALL = (
    "--engine",
    "transformers",
    "--batch-size",
    "2",
    "--prompt-tokens",
    "16",
    "--max-new-tokens",
    "4",
    "--trace",
)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
}
EVIL = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil")


# transformers has no causal model of this type, and asks whether the named class may run.
def test_a_class_that_a_configuration_names_is_not_loaded(stranger, tmp_path):
    config = {**SIZES, "model_type": "vit", "name_or_path": str(stranger.folder), "auto_map": EVIL}
    (stranger.folder / "config.json").write_text(json.dumps(config))
    stranger.plant("evil")
    plan = ["plan", str(stranger.folder), "--gpu-memory", "24GiB", *CALL]
    ran = subprocess.run(
        [sys.executable, "-c", "from oomguard.cli import main; main()", *plan],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert not stranger.ran()
    assert "run the custom code" not in ran.stdout
    assert ran.returncode == 2, ran.stderr


def test_fields_that_name_code_are_left_out_at_every_depth():
    code = {
        "auto_map": EVIL,
        "attn_implementation": "someone/kernel",
        "_attn_implementation": "someone/kernel",
    }
    parts = {
        "text_config": {**SIZES, **code, "model_type": "gemma3_text"},
        "vision_config": {**code},
        "notes": [{**code}],
    }
    found = auto_config({**parts, **code, "model_type": "gemma3", "name_or_path": "someone/model"})
    for part in (found, found.text_config, found.vision_config):
        assert not hasattr(part, "auto_map")
        assert part.name_or_path == ""
        assert part._attn_implementation is None
    assert found.notes == [{}]


def test_asked_process_refuses_them_whatever_it_trusts(stranger, tmp_path):
    """vLLM 0.10.1 to 0.17 asked transformers for such classes though trust_remote_code was off."""
    stranger.plant("evil")
    code = (
        "import sys; from oomguard.estimate.start.engine_layout import refuse_code; refuse_code()\n"
        "from transformers.dynamic_module_utils import get_class_from_dynamic_module as load\n"
        "load('evil.Evil', sys.argv[1])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(stranger.folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert "Evil is code of the model, which oomguard does not run" in ran.stderr
    assert not stranger.ran()
