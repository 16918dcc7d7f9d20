"""A whole ``vllm serve`` command given to ``plan``: settings become options, other flags go, unknown ones stay a mistake."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from oomguard.cli.plan import command

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(line: str):
        return CliRunner().invoke(command, shlex.split(line), prog_name="oomguard plan")

    return run


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("m --gpu-memory 24GiB --max-model-len 4096", ""),
        ("vllm serve m --gpu-memory 24GiB --max-model-len 4096", ""),
        ("--gpu-memory 24GiB -- vllm serve m --max_model_len=4096", ""),
        (
            "--gpu-memory 24GiB CUDA_VISIBLE_DEVICES=0 vllm serve m --max-model-len 4096 --api-key x --port 8000",
            " --api-key '***' --port 8000",
        ),
        (
            "--gpu-memory 24GiB python3 -m vllm.entrypoints.openai.api_server --model m --max-model-len 4096 --host 0.0.0.0",
            " --host 0.0.0.0",
        ),
        (
            "vllm serve --trust-remote-code m --served-model-name a b --gpu-memory 24GiB --max-model-len 4096",
            " --trust-remote-code --served-model-name a b",
        ),
        (
            "vllm serve --gpu-memory 24GiB --max-model-len 4096 --served-model-name a m",
            " --served-model-name a",
        ),
        (
            "vllm serve m --tool-call-parser hermes --enable-auto-tool-choice --gpu-memory 24GiB --max-model-l 4096",
            " --tool-call-parser hermes --enable-auto-tool-choice",
        ),
    ],
)
def test_pasted_command_is_planned_and_keeps_its_other_flags(plan, line, kept):
    ran = plan(f"{line} --format json")

    answer = json.loads(ran.output)
    assert (answer["max_model_len"], answer["command"]) == (
        4096,
        f"vllm serve m --max-model-len 4096{kept}",
    )
    assert not [assumed for assumed in answer["assumptions"] if "not counted" in assumed]


def test_uncounted_memory_flags_are_named_once_with_the_reason(plan):
    ran = plan(
        "vllm serve m --kv-offloading-backend native --enable-dbo --load-format dummy --gpu-memory 24GiB"
    )

    (line,) = [line for line in ran.output.splitlines() if "not counted" in line]
    assert line.endswith(
        "--kv-offloading-backend (a cache in host memory), --enable-dbo (two halves of a step at once)"
    )


def test_a_switch_that_is_off_takes_nothing(plan):
    assert "not counted" not in plan("m --no-enable-dbo --gpu-memory 24GiB").output


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("--trust-remote-codee", "--trust-remote-code"), ("--max-modle-len", "--max-model-len")],
)
def test_unknown_flag_is_an_error_with_the_nearest_spelling(plan, word, nearest):
    ran = plan(f"m --gpu-memory 24GiB {word} 8")

    assert ran.exit_code == 2
    assert f"No such option '{word}'" in ran.output
    assert nearest in ran.output


def test_the_file_of_flags_is_read_and_a_flag_beats_it(plan, tmp_path):
    (tmp_path / "serve.yaml").write_text("max-model-len: 2048\nmax-num-seqs: 8\n")
    answer = json.loads(
        plan(
            "vllm serve m --config serve.yaml --max-model-len 1024 --gpu-memory 24GiB --format json"
        ).output
    )

    assert (answer["max_model_len"], answer["max_num_seqs"]) == (1024, 8)


def test_captured_sizes_are_printed_as_the_engine_uses_them(plan):
    line = "m --gpu-memory 24GiB --cudagraph-capture-sizes 1 2 4 --format json --engine-version"

    assert json.loads(plan(f"{line} 0.27").output)["command"].endswith(
        "--cudagraph-capture-sizes 1 2 4"
    )
    older = shlex.split(json.loads(plan(f"{line} 0.9.2").output)["command"])
    assert older[-2:] == ["--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4]}']
