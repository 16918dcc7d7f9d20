"""``oomguard plan``: a model and a GPU in, the budget out; a mistake is one message, never a traceback."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.core.facts import GIB
from support.in_process import oomguard_text

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def plan(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # these tests are about the command, and the count is exact for this family
        patch.setitem(sys.modules, "torch", None)
        return oomguard_text("plan", *words, env=env)


def record(*words: object) -> dict:
    ran = plan(*words, "--format", "json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_json_holds_the_contract(model):
    answer = record(
        model,
        "--gpu-memory",
        "79.19GiB",
        "--engine-version",
        "0.19.0",
        "--gpu-memory-utilization",
        "0.95",
    )

    assert answer["schema"] == 1
    assert answer["fits"] is True
    assert {
        "weights_bytes",
        "kv_bytes_per_token",
        "kv_cache_pool_bytes",
        "kv_cache_tokens",
        "max_concurrency",
        "peak_activation_bytes",
        "cudagraph_bytes",
        "non_torch_bytes",
        "max_model_len",
        "assumptions",
        "uncertainty_bytes",
    } <= set(answer)
    assert answer["kv_bytes_per_token"] == 131072
    assert answer["weights_bytes"] / GIB == pytest.approx(14.99, abs=0.01)
    assert answer["kv_cache_pool_bytes"] / GIB == pytest.approx(58.11, abs=0.1)


def test_terminal_shows_budget_verdict_and_command(model):
    ran = plan(model, "--gpu-memory", "24GiB", "--max-model-len", "8192")

    assert ran.returncode == 0
    for text in ("weights", "14.99 GiB", "KV cache", "requests at once", "fits", "assumed: "):
        assert text in ran.stdout
    assert f"vllm serve {model} --max-model-len 8192" in ran.stdout


def test_the_command_that_fits_is_one_that_fits(model):
    asked = (model, "--gpu-memory", "24GiB", "--engine-version", "0.30")
    answer = record(*asked)
    assert not answer["fits"]
    words = shlex.split(answer["command"])
    assert words[:3] == ["vllm", "serve", str(model)]

    again = record(*asked, *words[3:])

    assert again["fits"]
    assert again["changes"] == []


def test_what_cannot_fit_says_how_many_gpus_or_how_large(model):
    answer = record(model, "--gpu-memory", "12GiB")
    assert (answer["fits"], answer["command"]) == (False, None)
    assert answer["smallest"]["gpu_total_bytes"] > 16 * GIB
    assert "it would fit on a GPU of " in plan(model, "--gpu-memory", "12GiB").stdout


def test_a_sweep_is_one_row_a_value(model):
    ran = plan(model, "--gpu-memory", "24GiB", "--sweep", "max-model-len=4096,65536")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == [
        "max_model_len",
        "4096",
        "65536",
    ]
    assert [line.split()[-1] for line in ran.stdout.splitlines()[1:]] == ["yes", "no"]
    rows = plan(
        model, "--gpu-memory", "24GiB", "--sweep", "max_model_len=4096,65536", "--format", "json"
    ).stdout.splitlines()
    assert [json.loads(row)["max_model_len"] for row in rows] == [4096, 65536]


@pytest.mark.parametrize(("length", "status"), [("4096", 0), ("131072", 1)])
def test_the_exit_status_can_tell_whether_it_fits(model, length, status):
    assert (
        plan(model, "--gpu-memory", "24GiB", "--max-model-len", length, "--exit-code").returncode
        == status
    )


def test_a_plan_within_its_uncertainty_is_unsure_and_says_what_decides(model):
    asked = (model, "--gpu-memory", "24GiB", "--engine-version", "0.30.0", "--max-model-len")
    ran = plan(*asked, "40960", "--exit-code")
    assert ran.returncode == 3
    assert ran.stdout.startswith("unsure: ")
    assert "to decide: " in ran.stdout
    answer = record(*asked, "40960")
    assert (answer["fit"], answer["fits"]) == ("unsure", False)
    assert answer["margin_bytes"] < answer["uncertainty_bytes"]
    assert "--calibrate" in answer["unsure"]["how"]
    assert record(*asked, "4096")["unsure"] is None


def test_each_part_keeps_its_source_in_json(model):
    sources = {part["name"]: part["source"] for part in record(model, "--gpu-name", "L4")["parts"]}
    assert (sources["weights"], sources["activations"]) == ("solved", "prior")


def test_a_size_needs_a_unit_and_a_refusal_in_json_is_json(model):
    ran = plan(model, "--gpu-memory", "24", "--format", "json")
    assert (ran.returncode, ran.stderr) == (2, "")
    answer = json.loads(ran.stdout)
    assert (answer["error"], answer["hint"]) == (
        "gpu_memory is 24, a size without a unit",
        "write 24GiB",
    )
    assert "write 24GiB" in plan(model, "--gpu-memory", "24").stderr
    assert record(model, "--gpu-memory", str(24 * GIB))["gpu_total_bytes"] == 24 * GIB


def test_a_platform_without_measured_starts_is_unsure(model):
    asked = ("--gpu-memory", "24GiB", "--max-model-len", "4096", "--gpu-name")
    assert record(model, *asked, "Intel Arc Pro B60")["fit"] == "unsure"
    assert record(model, *asked, "RTX 4090")["fit"] == "yes"


def test_a_little_known_start_is_unsure_and_shows_the_evidence(model):
    asked = (model, "--gpu-name", "A100", "--engine-version", "0.7.3", "--max-model-len", "4096")
    assert record(*asked)["fit"] == "yes"
    answer = record(*asked, "--tensor-parallel-size", "2")
    assert answer["fit"] == "unsure"
    assert "three of seven measured starts" in answer["unsure"]["because"]
    assert "--calibrate" in answer["unsure"]["how"]


def test_what_is_no_model_to_serve_is_one_line(tmp_path):
    for changes, message in [
        ({"model_type": None, "architectures": None}, "names no model"),
        ({"architectures": ["BertForPreTraining"]}, "is a class for training"),
        ({"num_attention_heads": 30, "num_key_value_heads": 7}, "not a multiple of"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        ran = plan(tmp_path, "--gpu-memory", "24GiB")
        assert ran.returncode == 2
        assert message in ran.stderr.splitlines()[0]


def test_a_sweep_of_a_long_name_is_no_wider_than_a_terminal(model):
    ran = plan(model, "--gpu-name", "H100", "--sweep", "gpu_memory_utilization=0.8,0.9")
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[0] == "0.9"


def test_the_largest_value_that_fits_is_solved(model):
    asked = (model, "--gpu-memory", "24GiB", "--engine-version", "0.30.0")
    answer = record(*asked, "--solve", "max_model_len")
    longest = answer["solved"]["value"]
    assert (answer["fit"], answer["max_model_len"]) == ("yes", longest)
    assert record(*asked, "--max-model-len", longest + 16)["fit"] == "unsure"
    seqs = record(*asked, "--max-model-len", "4096", "--solve", "max-num-seqs")
    assert 1 < seqs["solved"]["value"] <= seqs["max_concurrency"]
    ranks = record(
        *asked[:1],
        "--gpu-memory",
        "12GiB",
        "--max-model-len",
        "8192",
        "--solve",
        "tensor_parallel_size",
    )
    assert ranks["solved"]["value"] == 2
    text = plan(*asked, "--solve", "max_model_len").stdout
    assert text.startswith(f"max_model_len {longest} is the largest that surely fits")
    assert "one of max_model_len" in plan(*asked, "--solve", "seed").stderr


def test_a_gpu_is_known_by_its_name(model):
    assert record(model, "--gpu-name", "nvidia h100")["gpu_total_bytes"] == round(79.19 * GIB)


def test_settings_come_from_variables_too(model):
    import os

    env = {
        **os.environ,
        "OOMGUARD_GPU_MEMORY": "24GiB",
        "OOMGUARD_MAX_MODEL_LEN": "4096",
        "OOMGUARD_FORMAT": "json",
    }
    assert json.loads(plan(model, env=env).stdout)["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "0"], "gpu_memory must be a size above zero, got '0'"),
        (["--gpu-memory", "24 parsecs"], "24 parsecs"),
        (["--gpu-name", "no such"], "unknown GPU: 'no such'"),
        (["--gpu", "0", "--gpu-memory", "24GiB"], "sets its size and name"),
        (["--gpu", "99"], "GPU 99 is not visible on this machine"),
        (["--gpu-memory", "24GiB", "--max-model-len", "-5"], "--max-model-len"),
        (["--gpu-memory", "24GiB", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (
            ["--gpu-memory", "24GiB", "--tensor-parallel-size", "5"],
            "does not divide the 32 attention heads",
        ),
        (
            ["--gpu-memory", "24GiB", "--kv-cache-dtype", "int3"],
            "kv_cache_dtype 'int3' is not known",
        ),
        (["--gpu-memory", "24GiB", "--quantization", "awq"], "needs a checkpoint"),
        (
            ["--gpu-memory", "24GiB", "--engine-version", "latest"],
            "engine_version must be a version, got 'latest'",
        ),
        (["--gpu-memory", "24GiB", "--sweep", "colour=red"], "not a sweep"),
        (["--gpu-memory", "24GiB", "--sweep", "max_model_len=red"], "max_model_len is not 'red'"),
        (["--gpu-memory", "24GiB", "--kv-cache-memory-bytes", "0"], "kv_cache_memory_bytes is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_message(model, words, message):
    ran = plan(model, *words)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None, "model_type": "own"}, "num_hidden_layers is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a count"),
        (
            {"layer_types": ["full_attention"]},
            "the layer types name 1 layers, but num_hidden_layers is 32",
        ),
    ],
    ids=str,
)
def test_an_absurd_configuration_is_named_by_file_and_field(model, changes, message):
    (model / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    ran = plan(model, "--gpu-memory", "24GiB")
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_model_of_an_unknown_family_is_a_range_and_says_so(model):
    (model / "config.json").write_text(
        json.dumps({**LLAMA, "model_type": "nobody_knows_this", "architectures": ["Nobody"]})
    )
    answer = record(model, "--gpu-memory", "79GiB")
    assert any("computed from the configuration" in line for line in answer["assumptions"])
    assert answer["uncertainty_bytes"] > 0.05 * answer["weights_bytes"]


def test_without_a_gpu_here_it_says_what_to_give(model):
    ran = plan(model)
    if ran.returncode == 0:
        pytest.skip("a GPU is here")
    assert (ran.returncode, "--gpu-memory 24GiB" in ran.stderr) == (2, True)


def test_a_call_of_generate_is_planned_too(model):
    asked = (
        model,
        "--engine",
        "transformers",
        "--gpu-memory",
        "24GiB",
        "--batch-size",
        "8",
        "--prompt-tokens",
        "2048",
    )
    answer = record(*asked, "--max-new-tokens", "512")
    assert (answer["engine"], answer["fits"], answer["kv_cache_tokens"]) == (
        "transformers",
        True,
        8 * 2560,
    )
    assert answer["peak_allocated_bytes"] / GIB == pytest.approx(
        18.78, rel=0.02
    )  # a fake-tensor run of this model
    text = plan(*asked).stdout
    assert "peak allocated" in text
    assert "largest batch that fits: " in text


def test_the_token_table_of_a_call_is_a_sweep(model):
    ran = plan(
        model,
        "--engine",
        "transformers",
        "--gpu-memory",
        "24GiB",
        "--sweep",
        "max_new_tokens=512,4096",
    )
    assert [line.split()[0] for line in ran.stdout.splitlines()] == [
        "max_new_tokens",
        "512",
        "4096",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cache-implementation", "static"], "--trace"),
        (["--sweep", "max_model_len=1"], "not a sweep"),
        (["--batch-size", "0"], "--batch-size"),
    ],
)
def test_a_mistake_in_a_call_is_one_message(model, words, message):
    ran = plan(model, "--engine", "transformers", "--gpu-memory", "24GiB", *words)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_example_answers_its_four_questions(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    runpy.run_path(
        str(Path(__file__).parents[2] / "examples" / "plan_seeds.py"), run_name="__main__"
    )
    shown = capsys.readouterr().out
    assert [line[:2] for line in shown.splitlines() if line[:1].isdigit()] == [
        "1.",
        "2.",
        "3.",
        "4.",
    ]
    assert "one token is 0.25 MiB. The weights are 61.02 GiB" in shown


def test_a_measured_start_replaces_the_priors_now_and_later(model):
    log = Path(__file__).parents[2] / "examples" / "logs" / "vllm_0.12.0_start_worked.log"
    options = ["--max-model-len", 32768, "--max-num-batched-tokens", 2048]
    gpu = ["--gpu-memory", "24GiB", "--engine-version", "0.12"]

    calibrated = record(model, "--calibrate", log, *options)
    later = record(model, *gpu, *options)
    priors = record(model, *gpu, "--no-calibration", *options)

    assert calibrated["kv_cache_tokens"] == 40128  # as that log says
    assert any("as measured by a start of vLLM 0.12.0" in line for line in later["assumptions"])
    assert not any("as measured" in line for line in priors["assumptions"])
    assert calibrated["uncertainty_bytes"] < priors["uncertainty_bytes"]


def test_the_measured_start_most_like_the_plan_counts(model, tmp_path):
    log = Path(__file__).parents[2] / "examples" / "logs" / "vllm_0.12.0_start_worked.log"
    other = tmp_path / "other.log"
    other.write_text(log.read_text().replace("0.12.0", "0.13.0"))
    options = ["--max-model-len", 32768, "--max-num-batched-tokens", 2048]
    gpu = ["--gpu-memory", "24GiB"]

    both = record(
        model, "--calibrate", log, "--calibrate", other, *gpu, "--engine-version", "0.12", *options
    )
    later = record(model, *gpu, "--engine-version", "0.13", *options)
    neither = plan(
        model, "--calibrate", log, "--calibrate", other, *gpu, "--engine-version", "0.9", *options
    )

    assert (
        both["kv_cache_tokens"]
        == record(model, "--calibrate", log, *gpu, *options)["kv_cache_tokens"]
    )
    assert any("vLLM 0.13.0, other.log" in line for line in later["assumptions"])
    assert neither.returncode == 2
    assert "stored 2 logs, but none has a start like this plan" in neither.stderr


def test_a_log_that_measured_nothing_is_refused_in_two_lines(model, tmp_path):
    (tmp_path / "empty.log").write_text("nothing\n")
    ran = plan(model, "--calibrate", tmp_path / "empty.log")
    assert ran.returncode == 2
    assert "no vLLM start" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_where_vllm_is_not_installed_it_cannot_be_asked(model):
    ran = plan(model, "--gpu-memory", "24GiB", "--ask-engine")
    assert ran.returncode == 2
    assert "vLLM could not compute the layout: ModuleNotFoundError" in ran.stderr
    assert "Omit it to use the closed form" in ran.stderr


def test_utilization_above_the_wsl2_limit_is_lowered_below_it(model):
    """0.95 was refused three times with 30.12 of 31.84 GiB free; 0.93 was what its owner then took."""
    options = [
        "--gpu-memory",
        "31.84GiB",
        "--engine-version",
        "0.32",
        "--max-model-len",
        8192,
        "--gpu-memory-utilization",
        0.95,
    ]
    wsl2 = record(model, *options, "--memory-kind", "wsl2")
    assert wsl2["fits"] is False
    assert [change["to"] for change in wsl2["changes"]] == [0.945]
    assert any("wsl2" in line for line in wsl2["assumptions"])
    assert record(model, *options, "--memory-kind", "discrete")["fits"] is True


def test_engines_that_share_a_time_sliced_gpu_get_their_part(model):
    found = record(
        model,
        "--gpu-memory",
        "48GiB",
        "--gpu-replicas",
        2,
        "--engine-version",
        "0.32",
        "--max-model-len",
        8192,
    )
    assert [(change["setting"], change["to"]) for change in found["changes"]] == [
        ("gpu_memory_utilization", 0.5)
    ]


def test_a_gpu_of_this_machine_keeps_its_name(model, monkeypatch):
    """vLLM's defaults for an A100 are not those of its size."""
    from click.testing import CliRunner

    from oomguard.cli.plan import command
    from oomguard.probe import nvml

    def found(name: str) -> list[str]:
        monkeypatch.setattr(
            nvml, "devices", lambda: (nvml.Device(0, name, 80 * GIB, 79 * GIB, {}),)
        )
        ran = CliRunner().invoke(
            command, [str(model), "--gpu", "0", "--format", "json", "--engine-version", "0.32"]
        )
        assert ran.exit_code == 0, ran.output
        return json.loads(ran.stdout)["assumptions"]

    assert any(line.startswith("max_num_seqs 256") for line in found("NVIDIA A100-SXM4-80GB"))
    assert any(line.startswith("max_num_seqs 1024") for line in found("NVIDIA H100 80GB HBM3"))
    assert any("unified" in line for line in found("NVIDIA GB10"))


def test_value_that_the_engine_refuses_does_not_end_the_sweep(model):
    ran = plan(
        model,
        "--gpu-memory",
        "80GiB",
        "--sweep",
        "tensor_parallel_size=2,3,4",
        "--format",
        "json",
        "--exit-code",
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["fits"] for row in rows] == [True, False, True]
    assert "does not divide the 32 attention heads" in rows[1]["reasons"][0]
    assert ran.returncode == 1
    shown = plan(model, "--gpu-memory", "80GiB", "--sweep", "tensor_parallel_size=2,3,4")
    assert "3: tensor_parallel_size is 3" in shown.stdout
