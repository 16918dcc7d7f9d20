"""The file of `--config FILE`: read as vLLM reads it, never written, and beaten by a flag."""

from __future__ import annotations

import json
import os

from oomguard.engines.command import Launch
from oomguard.engines.vllm.command import read_config_file
from oomguard.engines.vllm.launch import settings_in_force, shown


def config(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


def read(path, *, is_of_subcommand=False):
    return read_config_file(path, "vllm", is_of_subcommand=is_of_subcommand)


def values(path, *, is_of_subcommand=False):
    return {
        name: found.value
        for name, found in read(path, is_of_subcommand=is_of_subcommand).settings.items()
    }


def test_every_kind_of_value_is_read(tmp_path):
    path = config(
        tmp_path,
        "model: m\nmax-model-len: 32k\ngpu_memory_utilization: 0.5\nenforce-eager: true\nenable-prefix-caching: false\n"
        "cudagraph-capture-sizes: [1, 2]\nspeculative-config:\n  method: ngram\n  num_speculative_tokens: 3\nmax-num-seqs: null\n",
    )
    found = values(path)
    assert json.loads(found.pop("speculative_config")) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
    }
    assert found == {
        "max_model_len": 32000,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": "1 2",
    }


def test_keys_with_dots_are_parts_of_one_object(tmp_path):
    path = config(
        tmp_path, "speculative-config.method: ngram\nspeculative-config.num_speculative_tokens: 3\n"
    )
    assert json.loads(values(path)["speculative_config"]) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
    }


def test_a_switch_is_on_or_off_as_the_file_says(subtests, tmp_path):
    for written, value in [("true", True), ("false", False)]:
        with subtests.test(written=written, value=value):
            path = config(tmp_path, f"enforce-eager: {written}\nenable_prefix_caching: {written}\n")
            assert values(path) == {"enforce_eager": value, "enable_prefix_caching": value}


def test_subcommand_gets_no_switch_that_its_file_turns_off(tmp_path):
    path = config(tmp_path, "enforce-eager: true\nenable_prefix_caching: false\n")
    assert values(path, is_of_subcommand=True) == {"enforce_eager": True}


def test_the_command_tells_whether_a_subcommand_takes_the_file(subtests, tmp_path):
    for argv, has_it in [
        (("vllm", "serve", "m"), False),
        (("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"), True),
    ]:
        with subtests.test(argv=argv, has_it=has_it):
            path = config(tmp_path, "enable_prefix_caching: false\n")
            assert (
                "enable_prefix_caching" in settings_in_force(Launch((*argv, "--config", path)))
            ) is has_it


def test_of_a_repeated_key_the_last_one_counts_and_it_is_told(tmp_path):
    path = config(tmp_path, "max-model-len: 5\nport: 1\nmax-model-len: 6\n")
    assert values(path) == {"max_model_len": 6}
    assert read(path).repeated == ("max-model-len",)
    assert (
        read(path).settings["max_model_len"].source.endswith("sets it twice: the last value counts")
    )


def test_a_flag_beats_the_file_and_each_says_where_it_stands(tmp_path):
    path = config(tmp_path, "max-model-len: 5\nmax-num-seqs: 6\n")
    found = settings_in_force(
        Launch(("vllm", "serve", "m", "--config", path, "--max-model-len", "7"))
    )
    del found["model"]
    assert {name: (one.value, one.source) for name, one in found.items()} == {
        "max_model_len": (7, "command"),
        "max_num_seqs": (6, f"config file {path}"),
    }


def test_a_change_goes_into_the_command_and_leaves_the_file(tmp_path):
    path = config(tmp_path, "max-model-len: 5\n")
    assert shown(Launch(("vllm", "serve", "--config", path)), {"max_model_len": 7}) == (
        f"vllm serve --config {path} --max-model-len 7"
    )
    assert (tmp_path / "c.yaml").read_text() == "max-model-len: 5\n"


def test_file_without_a_mapping_gives_nothing_and_no_error(subtests, tmp_path):
    for text in [
        "- a list\n",
        "",
        "a: [\n",
        "!!python/object:os.system x\n",
        "a: " + "[" * 5000,
        "\x00",
    ]:
        with subtests.test(text=text):
            assert read(config(tmp_path, text)) is None


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "f.yaml")
    assert read(str(tmp_path / "f.yaml")) is None
    assert read(str(tmp_path / "none.yaml")) is None
    assert read("/dev/zero") is None


def test_unreadable_file_makes_absent_flags_unknown():
    found = settings_in_force(
        Launch(("vllm", "serve", "m", "--config", "none.yaml", "--max-model-len", "8"))
    )
    assert found["max_model_len"].source == "given"


def test_vllm_reads_the_file_only_if_its_flag_stands_alone(tmp_path):
    path = config(tmp_path, "max-model-len: 5\n")
    assert set(settings_in_force(Launch(("vllm", "serve", "m", f"--config={path}")))) == {"model"}


def test_many_names_for_one_value_do_not_blow_up(tmp_path):
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    path = config(tmp_path, "\n".join([*rows, "max-model-len: 9\n"]))
    assert values(path) == {"max_model_len": 9}
