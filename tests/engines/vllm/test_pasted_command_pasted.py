"""The words of a vLLM command as options: in every form that its parser takes."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.errors import InputError
from oomguard.core.settings import surfaces
from oomguard.engines.command import all_flags
from oomguard.engines.vllm.pasted_command import read_pasted

FLAGS = all_flags("vllm")

OPTIONS = {
    "--max-model-len": True,
    "--enforce-eager": False,
    "--gpu-memory": True,
    "--speculative-config": True,
    "--cudagraph-capture-sizes": True,
    "--max-cudagraph-capture-size": True,
    "--limit-mm-per-prompt": True,
    "-tp": True,
    "--tensor-parallel-size": True,
}


def read(line: str) -> list[str]:
    return read_pasted(shlex.split(line), OPTIONS).words


def test_setting_becomes_an_option_and_other_flags_stay(subtests):
    for line, words in [
        ("m --max-model-len 32k", "--max-model-len 32000 m"),
        ("m --max-model-len 32K", "--max-model-len 32768 m"),
        ("m --max-model-len auto", "m"),
        ("m --max-model-len 8 --seed 0", "m --max-model-len 8"),
        ("m -tp 2 -dpl 1", "m -tp 2"),
        ("m --no-enforce-eager", "m"),
        ("m --enforce_eager", "--enforce-eager m"),
        ("m -cc.max_cudagraph_capture_size 8", "--max-cudagraph-capture-size 8 m"),
        ("m --cudagraph-capture-sizes 1 2 4 --seed 0", "--cudagraph-capture-sizes '1 2 4' m"),
        (
            "m --language-model-only",
            """m --limit-mm-per-prompt '{"image": 0, "video": 0, "audio": 0}'""",
        ),
        ("m --speculative-config.method ngram", """--speculative-config '{"method": "ngram"}' m"""),
        ("--seed 0 m", "m"),
        ("--seed=0 m", "m"),
        ("--model m --seed 0", "m"),
        ("m --allowed-origins x --lora-modules a=b c=d", "m"),
        ("-- --seed", "-- --seed"),
        ("", ""),
    ]:
        with subtests.test(line=line, words=words):
            assert sorted(read(line)) == sorted(shlex.split(words))


def test_memory_flag_that_is_no_option_is_named_as_typed(subtests):
    for line, flags in [
        ("m -O3", ["-O3"]),
        ("m -O 3", ["-O"]),
        ("""m -cc '{"cudagraph_capture_sizes": [1], "max_cudagraph_capture_size": 1}'""", []),
        ("""m -cc '{"cudagraph_capture_sizes": [1], "mode": 0}'""", ["-cc"]),
        ("m -cc.cudagraph_mode NONE", ["-cc"]),
        ("m --compilation_config.mode=0 -cc.cudagraph_mode NONE", ["--compilation_config"]),
        ("m --no-enable-chunked-prefill --enable-chunked-prefill", ["--no-enable-chunked-prefill"]),
    ]:
        with subtests.test(line=line, flags=flags):
            found = read_pasted(shlex.split(line), OPTIONS).not_counted

            assert [entry.split()[0] for entry in found] == flags


def test_a_file_of_flags_that_cannot_be_read_is_a_mistake():
    with pytest.raises(InputError, match=r"none\.yaml"):
        read("m --config none.yaml")


OTHERS = sorted(FLAGS.names - FLAGS.takes_memory.keys() - FLAGS.means.keys() - {"model", "config"})
OURS = {
    flag.removeprefix("--")
    for own in surfaces("vllm").values()
    for flag in (*own.flags, *own.aliases)
}


@given(
    before=st.lists(st.sampled_from([name for name in OTHERS if name not in OURS]), max_size=4),
    after=st.lists(st.sampled_from([name for name in OTHERS if name not in OURS]), max_size=4),
    equals=st.booleans(),
)
def test_flags_without_memory_effect_change_nothing(before, after, equals):
    def words(names: list[str]) -> list[str]:
        valued = [name not in FLAGS.alone for name in names]
        pairs = zip(names, valued, strict=True)
        if equals:
            return [f"--{name}=x" if value else f"--{name}" for name, value in pairs]
        return [
            word
            for name, value in pairs
            for word in ([f"--{name}", "x"] if value else [f"--{name}"])
        ]

    found = read_pasted([*words(before), "--max-model-len", "8", "m", *words(after)], OPTIONS)

    assert (found.words, found.not_counted, found.unknown) == (
        ["--max-model-len", "8", "m"],
        [],
        None,
    )
