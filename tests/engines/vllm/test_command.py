"""Commands that hand settings to vLLM by themselves: found on every surface, read, and changed."""

from __future__ import annotations

import json
import shlex

from oomguard.engines.command import Launch
from oomguard.engines.vllm.command import own_command
from oomguard.engines.vllm.launch import settings_in_force, shown

OWN = (
    "vllm serve m",
    "/opt/env/bin/vllm serve m",
    "python /opt/env/bin/vllm serve m",
    "python3 -m vllm.entrypoints.openai.api_server --model m",
    "python -m vllm.entrypoints.openai.run_batch -i a -o b --model m",
    "python -m vllm.entrypoints.cli.main serve m",
    "vllm run-batch -i a.jsonl -o b.jsonl --model m",
    "vllm bench latency --model m --input-len 30",
    "vllm bench throughput --model m --async-engine",
    "vllm bench startup --model m",
    "env CUDA_VISIBLE_DEVICES=0 vllm serve m",
    "nohup nice -n 1 timeout 9 vllm serve m",
    "uv run vllm serve m",
    "bash -c 'exec vllm serve m'",
)
OTHERS = (
    "python script.py --max-model-len 9",
    "vllm",
    "vllm chat",
    "vllm bench serve --model m",
    "echo vllm serve",
    "lm_eval --model hf --model_args pretrained=m",
    "bash run.sh",
    "bash -c 'for m in a b; do vllm serve $m; done'",
    "bash -c 'vllm serve a & vllm serve b'",
    "torchrun train.py --max-model-len 9",
)


def values(line):
    found = settings_in_force(Launch(tuple(shlex.split(line))))
    return {name: one.value for name, one in found.items() if name != "model"}


def changed(line, **settings):
    return shown(Launch(tuple(shlex.split(line))), settings)


def test_flags_of_every_command_of_vllm_are_read_and_changed(subtests):
    for line in OWN:
        with subtests.test(line=line):
            given = (
                line[:-1] + " --max_model_len=9'"
                if line.endswith("'")
                else f"{line} --max_model_len=9"
            )
            assert values(given) == {"max_model_len": 9}
            assert shlex.split(changed(given, max_model_len=7)) == shlex.split(
                given.replace("--max_model_len=9", "--max-model-len 7")
            )
            assert values(changed(line, max_model_len=7)) == {"max_model_len": 7}


def test_a_command_of_vllm_lists_all_that_the_user_set(subtests):
    for line in OWN:
        with subtests.test(line=line):
            model = settings_in_force(Launch(tuple(shlex.split(line))))["model"]
            assert (model.value, model.source) == ("m", "command")


def test_plugin_reaches_other_commands_unchanged(subtests):
    for line in OTHERS:
        with subtests.test(line=line):
            assert own_command(shlex.split(line)) is None
            assert changed(line, max_model_len=7).endswith(line)


def test_every_form_of_a_flag_is_read_as_vllm_reads_it(subtests):
    for words, found in [
        ("--max-model-len 32k", {"max_model_len": 32_000}),
        ("--max-model-len 32K", {"max_model_len": 32_768}),
        ("--max-model-len 25.6k", {"max_model_len": 25_600}),
        ("--max-model 5", {"max_model_len": 5}),
        ("--kv-cache-memory=1g", {"kv_cache_memory_bytes": 10**9}),
        ("--max-model-len 1 --max_model_len=2", {"max_model_len": 2}),
        ("--max-model-len auto", {"max_model_len": None}),
        ("--max-model-len -1", {"max_model_len": None}),
        ("--max-num 5", {}),
        ("--device cuda", {}),
        ("-O3 -O.level=3", {}),
        ("-tp=2", {"tensor_parallel_size": 2}),
        ("--no-enable-prefix", {"enable_prefix_caching": False}),
        (
            "--cudagraph-capture-sizes 1 2 4 --block-size 8",
            {"cudagraph_capture_sizes": "1 2 4", "block_size": 8},
        ),
        (
            "--compilation-config.cudagraph_capture_sizes '[1, 2]'",
            {"cudagraph_capture_sizes": "[1, 2]"},
        ),
        ("""-cc '{"cudagraph_capture_sizes": [1, 2]}'""", {"cudagraph_capture_sizes": "[1, 2]"}),
        ("--speculative-config {method:ngram}", {"speculative_config": "{method:ngram}"}),
    ]:
        with subtests.test(words=words, found=found):
            assert values(f"vllm serve m {words}") == found


def test_object_keys_given_singly_replace_a_whole_object():
    whole = """--speculative-config '{"model": "x"}'"""
    found = values(
        f"vllm serve m --speculative_config.method ngram --speculative-config.num_speculative_tokens=5 {whole}"
    )
    assert json.loads(found["speculative_config"]) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
    }


def test_abbreviated_and_repeated_flags_become_one_full_flag():
    assert changed("vllm serve m --max-model 5 --port 1 --max_model_len=6", max_model_len=7) == (
        "vllm serve m --port 1 --max-model-len 7"
    )


def test_a_script_s_flags_are_not_taken_for_abbreviations():
    assert values("python script.py --max-model 5") == {}


def test_new_flag_comes_last_if_the_shell_may_add_flags():
    line = "bash -c 'vllm serve m --max-model-len 9 $EXTRA'"
    assert shlex.split(changed(line, max_model_len=7))[2] == "vllm serve m $EXTRA --max-model-len 7"
    assert settings_in_force(Launch(tuple(shlex.split(line))))["max_model_len"].source == "given"


LM_EVAL = "lm_eval --model vllm --model_args {} --tasks x"


def test_lm_eval_arguments_are_read_and_changed_in_place():
    line = LM_EVAL.format("pretrained=m,max_model_len=32768,gpu_memory_utilization=0.5")
    assert values(line) == {"max_model_len": 32768, "gpu_memory_utilization": 0.5}
    assert changed(line, max_model_len=7) == line.replace("32768", "7")
    assert changed(line, enforce_eager=True) == line.replace("=0.5", "=0.5,enforce_eager=True")


def test_lm_eval_s_own_name_of_an_argument_is_kept():
    line = LM_EVAL.format("pretrained=m,max_length=32768")
    assert values(line) == {"max_model_len": 32768}
    assert changed(line, max_model_len=7) == line.replace("32768", "7")


def test_arguments_of_lm_eval_may_be_json_or_words_of_their_own():
    assert json.loads(
        shlex.split(changed(LM_EVAL.format("""'{"pretrained": "m"}'"""), max_model_len=7))[4]
    ) == {
        "pretrained": "m",
        "max_model_len": 7,
    }
    line = "lm_eval run --model=vllm --model_args pretrained=m max_model_len=9 --tasks x"
    assert changed(line, max_model_len=7) == line.replace("=9", "=7")


def test_lm_eval_arguments_with_commas_are_left_to_the_plugin():
    line = LM_EVAL.format("""'pretrained=m,limit_mm_per_prompt={"image": 1, "video": 0}'""")
    assert changed(line, max_model_len=7).startswith("OOMGUARD_VLLM_OVERRIDES=")
