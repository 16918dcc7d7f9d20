"""Which modules a quantised checkpoint leaves as they are: by name, glob or pattern, all of them a stranger's."""

from __future__ import annotations

import time

import pytest

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.quantization import ModuleNames

MODULE = "model.layers.3.mlp.gate_proj"


def test_module_is_excluded_by_name_parent_glob_or_pattern(subtests):
    for entry in [
        MODULE,
        "model.layers.3",
        "layers.3.mlp",
        "mlp",
        "*.mlp.*",
        "model*",
        "re:.*gate_proj$",
        "re:model",
    ]:
        with subtests.test(entry=entry):
            assert ModuleNames([entry]).has(MODULE)


def test_a_part_of_a_name_and_what_is_no_pattern_leave_nothing(subtests):
    for entry in [
        "",
        "odel",
        "layers.3.ml",
        "mlp.layers",
        "*.mlp",
        "re:.*up_proj",
        "re:gate",
        "re:(",
    ]:
        with subtests.test(entry=entry):
            assert not ModuleNames([entry]).has(MODULE)


def test_endless_patterns_are_reported_or_skipped_in_time(subtests):
    for entry in [
        "re:(?:a|a|aa)+b",
        "re:(?:x+x+)+y",
        "*a" * 400,
        "re:(?:(?:a{1,9999}){1,9999}){1,9999}",
    ]:
        with subtests.test(entry=entry):
            began = time.process_time()
            left = ModuleNames([entry])
            try:
                for number in range(200):
                    left.has("a" * 300 + f".{number}")
            except ConfigError as error:
                assert "quantization_config has patterns that need more than 2 s" in str(error)  # noqa: PT017 - either may be
            assert time.process_time() - began < 10


def test_more_patterns_than_any_model_needs_are_refused():
    with pytest.raises(ConfigError, match="has 501 patterns, but oomguard reads at most 500"):
        ModuleNames(f"*.{number}.*" for number in range(501))


def test_a_pattern_of_thousands_of_characters_is_refused():
    with pytest.raises(ConfigError, match="of 5003 characters"):
        ModuleNames(["re:" + "x" * 5000])


def test_hundreds_of_thousands_of_names_are_looked_up_at_once():
    left = ModuleNames(f"model.layers.{number}.mlp" for number in range(300_000))
    began = time.process_time()

    assert sum(left.has(f"model.layers.{number}.mlp.up_proj") for number in range(10_000)) == 10_000
    assert time.process_time() - began < 5


def test_what_a_file_calls_the_decoder_does_not_matter(subtests):
    for prefix in ["model.", "backbone.", "model.language_model.", "language_model.model.", ""]:
        with subtests.test(prefix=prefix):
            named = ModuleNames([f"{prefix}layers.3.mlp.gate_proj"])

            assert named.has(MODULE)
            assert not named.has("model.layers.4.mlp.gate_proj")
            assert not named.has("model.vision_tower.layers.3.mlp.up_proj")


def test_a_trailing_wildcard_covers_the_tree_behind_any_prefix_of_the_decoder():
    """ModelOpt writes module_path*, with the file's own prefix of the decoder."""
    for pattern in ("backbone.layers.12.mixer*", "language_model.model.layers.12.mixer*"):
        names = ModuleNames([pattern])
        assert names.has("model.layers.12.mixer.in_proj")
        assert not names.has("model.layers.120.mixer.in_proj")
    assert ModuleNames(["model.visual*"]).has("visual.blocks.0.attn.qkv")
