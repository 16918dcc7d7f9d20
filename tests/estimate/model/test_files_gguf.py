"""A GGUF file: its size is what the weights take, and a plan without it says what to give."""

from __future__ import annotations

import json

import pytest

from oomguard.core.errors import InputError, SettingError
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import read_model

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
FILE_BYTES = 100_000


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def weights_bytes(path, **settings):
    return sum(
        parameter.bytes for parameter in read_model(find_model(str(path)), **settings).parameters
    )


def test_weights_are_the_bytes_of_the_file_or_its_folder(folder):
    (folder / "model-Q8_0.gguf").write_bytes(bytes(FILE_BYTES))

    assert weights_bytes(folder / "model-Q8_0.gguf") == pytest.approx(FILE_BYTES, rel=0.001)
    assert weights_bytes(folder, quantization="gguf") == pytest.approx(FILE_BYTES, rel=0.001)


def test_the_parts_of_one_file_count_together(folder):
    for part in (1, 2):
        (folder / f"model-Q4_K_M-0000{part}-of-00002.gguf").write_bytes(bytes(FILE_BYTES))

    assert weights_bytes(folder, quantization="gguf") == pytest.approx(2 * FILE_BYTES, rel=0.001)


def test_folder_without_requested_files_is_read_as_before(folder):
    before = weights_bytes(folder)
    (folder / "model-Q8_0.gguf").write_bytes(bytes(FILE_BYTES))

    assert weights_bytes(folder) == before


def test_without_one_file_the_plan_says_what_to_give(subtests, folder):
    for names in [(), ("a-Q4_0.gguf", "a-Q8_0.gguf")]:
        with subtests.test(names=names):
            for name in names:
                (folder / name).write_bytes(bytes(FILE_BYTES))

            with pytest.raises(SettingError, match="gguf") as refused:
                weights_bytes(folder, quantization="gguf")
            assert "name FILE.gguf" in str(refused.value.hint)


def test_a_file_without_a_configuration_beside_it_says_so(tmp_path):
    (tmp_path / "model.gguf").write_bytes(bytes(FILE_BYTES))

    with pytest.raises(InputError, match=r"there is no config\.json next to it"):
        find_model(str(tmp_path / "model.gguf"))
