"""What a command's flags are read as here is what the real engine's own parser makes of them, in every form that it takes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from oomguard.core.settings import surface
from oomguard.engines.command import Launch
from oomguard.engines.vllm.launch import apply, settings_in_force

CONFIG = """\
max-model-len: 4096
gpu-memory-utilization: 0.5
max_num_seqs: 7
max-num-seqs: 9
enforce-eager: true
enable-prefix-caching: false
speculative-config: {method: ngram, num_speculative_tokens: 3}
"""
DOTTED = """\
enforce-eager: false
speculative-config.method: ngram
speculative-config.num_speculative_tokens: 3
"""
LINES = (
    ("--max-model-len", "32k"),
    ("--max-model-len", "32K"),
    ("--max-model", "2.5k"),
    ("--max_model_len=4096", "--max-model-len", "512"),
    ("--max-model-len", "auto"),
    ("--max-model-len=-1",),
    ("--kv-cache-mem", "1m", "--max-num-b", "1K"),
    ("--gpu-mem=0.5", "-tp", "2", "-pp=1"),
    ("--device-memory-utilization", "0.25"),
    ("--enforce-e", "--no-enable-prefix"),
    ("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=5"),
    (
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 3}',
        "--speculative_config.method",
        "ngram",
    ),
    ("-O2", "--block-size", "32"),
    ("-O", "1", "--limit-mm-per-prompt.image", "2"),
    ("--cudagraph-capture-sizes", "1", "2", "4", "--max-num-seqs", "8"),
    ("--quantization", "fp8", "-qawq"),
    ("--config", "c.yaml", "--max-num-seqs", "5"),
    ("--max-num-seqs", "5", "--config", "c.yaml"),
    ("--config=c.yaml", "--max-num-seqs", "5"),
    ("--config", "dotted.yaml"),
)
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

main = FlexibleArgumentParser()
serve = main.add_subparsers(dest="subparser").add_parser("serve")
make_arg_parser(serve)
alone = make_arg_parser(FlexibleArgumentParser())
found = []
for words in json.load(sys.stdin):
    read = vars((main if words[0] == "serve" else alone).parse_args(words))
    found.append({k: v for k, v in read.items() if v is None or isinstance(v, (int, float, str, bool, list, dict))})
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parser")
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "dotted.yaml").write_text(DOTTED)
    return folder


def parsed(
    lines: list[list[str]], vllm_env: dict[str, str], place: Path
) -> list[dict[str, object]]:
    ran = subprocess.run(
        ["python", "-c", PARSE],
        input=json.dumps(lines),
        cwd=place,
        env=vllm_env,
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    assert told, ran.stderr[-3000:]
    found: list[dict[str, object]] = json.loads(told[0].removeprefix("FOUND "))
    return found


def as_engine_has_it(name: str, value: object) -> object:
    own = surface(name, "vllm")
    if isinstance(value, str) and value.startswith("{"):
        return json.loads(value)
    if own.many and isinstance(value, str):
        return [int(word) for word in value.split()]
    return value


def test_flags_and_files_are_read_as_by_the_engines_parser(vllm_env, place, monkeypatch):
    monkeypatch.chdir(place)
    plain, *found = parsed(
        [["serve", "m"], *(["serve", "m", *words] for words in LINES)], vllm_env, place
    )

    for words, engine in zip(LINES, found, strict=True):
        ours = settings_in_force(Launch(("vllm", "serve", "m", *words)))
        assert ours.pop("model").value == engine["model_tag"]
        for name, setting in ours.items():
            kwarg = surface(name, "vllm").kwarg or name
            if setting.value is None:  # found by the engine itself
                assert engine[kwarg] == -1, words
            else:
                assert engine[kwarg] == as_engine_has_it(name, setting.value), (words, name)
        for name in set(NAMES) - set(ours):  # what is not found here is not given there
            assert engine[name] == plain[name], (words, name)


def test_file_switch_reaches_a_modules_engine_not_a_subcommands(vllm_env, place, monkeypatch):
    monkeypatch.chdir(place)
    words = ("--config", "c.yaml")
    of_subcommand, of_module = parsed(
        [["serve", "m", *words], ["--model", "m", *words]], vllm_env, place
    )

    name = "enable_prefix_caching"
    assert (of_subcommand[name], of_module[name]) == (None, False)
    assert name not in settings_in_force(Launch(("vllm", "serve", "m", *words)))
    api_server = Launch(
        ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", *words)
    )
    assert settings_in_force(api_server)[name].value is False


NAMES = (
    "max_model_len",
    "max_num_seqs",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "enforce_eager",
)


def test_changed_command_has_the_new_value_in_the_engines_parser(
    vllm_env, place, monkeypatch, tmp_path
):
    monkeypatch.chdir(place)
    wanted = {"max_model_len": 777, "gpu_memory_utilization": 0.125, "enforce_eager": True}
    changed = [
        apply(Launch(("vllm", "serve", "m", *words)), wanted, tmp_path).argv for words in LINES
    ]

    for words, engine in zip(
        LINES, parsed([list(argv[1:]) for argv in changed], vllm_env, place), strict=True
    ):
        assert {name: engine[name] for name in wanted} == wanted, words
