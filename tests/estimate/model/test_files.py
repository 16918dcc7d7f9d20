"""Finding a model: a folder, a file, a hub name; headers are read, weights never."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.errors import ConfigError, InputError
from oomguard.estimate.model.files import Parameter, find_model

CONFIG = {"model_type": "llama", "num_hidden_layers": 1}


def safetensors(
    path: Path, tensors: dict[str, tuple[str, list[int]]], *, length: int | None = None
) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            **{
                n: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for n, (d, s) in tensors.items()
            },
        }
    )
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_without_weights_gives_its_configuration(folder):
    found = find_model(str(folder))
    assert (found.config, found.parameters, found.config_path) == (
        CONFIG,
        None,
        str(folder / "config.json"),
    )


def test_a_config_file_alone_is_enough(folder):
    assert find_model(str(folder / "config.json")).config == CONFIG


def test_the_headers_tell_shapes_and_bytes(folder):
    safetensors(
        folder / "model.safetensors",
        {"a": ("BF16", [2, 3]), "b": ("F8_E4M3", [4]), "c": ("F4", [8])},
    )
    assert find_model(str(folder)).parameters == (
        Parameter("a", (2, 3), 12),
        Parameter("b", (4,), 4, floating=False),
        Parameter("c", (8,), 4, floating=False),
    )


def test_an_index_names_the_files_that_count(folder):
    safetensors(folder / "model-1.safetensors", {"a": ("BF16", [2])})
    safetensors(folder / "other.safetensors", {"z": ("BF16", [9])})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    assert [p.name for p in find_model(str(folder)).parameters] == ["a"]


def test_the_vendor_s_own_copy_is_not_counted_twice(folder):
    safetensors(folder / "consolidated.safetensors", {"a": ("BF16", [2])})
    safetensors(folder / "model.safetensors", {"b": ("BF16", [2])})
    assert [p.name for p in find_model(str(folder)).parameters] == ["b"]


def test_a_download_that_is_not_complete_is_told(folder):
    safetensors(folder / "model-1.safetensors", {"a": ("BF16", [2])})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(
        ConfigError,
        match=r"model-2\.safetensors, but the folder lacks it \(1 of 2 files are missing\)",
    ):
        find_model(str(folder))


def test_index_without_its_files_leaves_the_configuration(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    assert find_model(str(folder)).parameters is None


def test_a_damaged_header_is_refused_by_name(subtests, folder):
    for length in [0, 3, 2**40, 2**64 - 1]:
        with subtests.test(length=length):
            safetensors(folder / "model.safetensors", {"a": ("BF16", [2])}, length=length)
            with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
                find_model(str(folder))


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    with contextlib.suppress(ConfigError):  # any other exception is a finding
        find_model(str(folder))


def test_a_config_that_is_no_object_is_refused_by_name(subtests, tmp_path):
    for text in [
        "",
        "{",
        "[]",
        "3",
        '"a"',
        "\ud83d".encode("utf-8", "surrogatepass").decode("latin-1"),
        "[" * 100_000,
    ]:
        with subtests.test(text=text):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(ConfigError, match=r"config\.json: "):
                find_model(str(tmp_path))


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        find_model(str(tmp_path))


def test_what_is_no_hub_name_is_not_looked_for_there(subtests):
    for name in ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "x/config.json"]:
        with subtests.test(name=name), pytest.raises(InputError, match="no such folder or file"):
            find_model(name)


def test_without_the_hub_s_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="huggingface_hub is not installed"):
        find_model("some-org/some-model")


def test_a_hub_that_does_not_answer_is_one_message(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("offline\nand a second line")

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    monkeypatch.setattr("oomguard.estimate.model.files._is_offline", lambda _: True)
    with pytest.raises(InputError, match=r"is not in the cache .*models--some-org--some-model"):
        find_model("some-org/some-model")
    monkeypatch.setattr("oomguard.estimate.model.files._is_offline", lambda _: False)
    with pytest.raises(InputError, match=r"the hub did not return its config\.json \(offline\)"):
        find_model("some-org/some-model")
