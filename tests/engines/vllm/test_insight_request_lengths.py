"""How long the requests of a command are: by its flags, and by the engine's refusal of one under our length."""

from __future__ import annotations

import math
import shlex

from oomguard.engines.command import Launch
from oomguard.engines.vllm.insight import asked_length, refused_length


def asked(line):
    return {
        name: need.value for name, need in asked_length(Launch(tuple(shlex.split(line)))).items()
    }


def test_flags_tell_the_longest_request(subtests):
    for line, tokens in [
        ("vllm bench latency --model m", 160),
        ("vllm bench latency --model m --input-len 3000", 3128),
        (
            "env A=1 vllm bench latency --model m --input_len=3000 --output-len 10 --output-len 20",
            3020,
        ),
        ("vllm bench throughput --model m --random-input-len 2000 --random-range-ratio 0.5", 3192),
        ("vllm bench throughput --model m --dataset-name random --random-input-len 2000", 2000),
        ("python bench.py --input-len 3000 --output-len 100", 3100),
        ("bash -c 'python bench.py --input-len 3000'", 3000),
    ]:
        with subtests.test(line=line, tokens=tokens):
            assert asked(line) == {"max_model_len": tokens}


def test_other_commands_tell_none(subtests):
    for line in [
        "vllm serve m",
        "python s.py --input-len",
        "python s.py --input-len x",
        "vllm bench throughput --model m --dataset-path d",
        "",
    ]:
        with subtests.test(line=line):
            assert asked(line) == {}


def test_the_flags_are_named():
    assert asked_length(Launch(("vllm", "bench", "latency", "--input-len", "9")))[
        "max_model_len"
    ].why == ("the command asks for (--input-len 9)")


def test_a_refusal_tells_what_the_request_needs(subtests):
    for text, tokens in [
        (
            "ValueError: The decoder prompt (length 3000) is longer than the maximum model length of 1792. Make sure",
            3001,
        ),
        (
            "The decoder prompt (length 1792) plus the number of requested output tokens (at least 1) is longer than the maximum model length of 1792.",
            1793,
        ),
        (
            "This model's maximum context length is 1792 tokens. However, your prompt contains at least 1793 input tokens, which",
            1794,
        ),
        (
            "This model's maximum context length is 1792 tokens. However, you requested 5000 tokens (4900 in the messages",
            5000,
        ),
        ("ValueError: Input length (2000) exceeds model's maximum context length (1792).", 2001),
        (  # 0.18 to 0.31
            (
                "This model's maximum context length is 1792 tokens. However, you requested 128 output tokens and your prompt contains "
                "1700 input tokens, for a total of 1828 tokens. Please reduce the length of the input prompt or the"
            ),
            1828,
        ),
        (
            (
                "This model's maximum context length is 1792 tokens. However, you requested 128 output tokens and your prompt contains "
                "at least 1665 input tokens, for a total of at least 1793 tokens."
            ),
            1793,
        ),
        (
            (
                "This model's maximum context length is 1792 tokens. However, you requested 9 output tokens and your prompt contains "
                "99999 characters (more than 57056 characters, which"
            ),
            math.inf,
        ),
        (  # 0.18 and later, of a text that is too long to be worth its tokens
            "This model's maximum context length is 1792 tokens. However, your prompt contains 99999 characters (more than 57344 characters)",
            math.inf,
        ),
        (
            "AssertionError: Please ensure that max_model_len is greater than the sum of input_len and output_len.",
            math.inf,
        ),
    ]:
        with subtests.test(text=text, tokens=tokens):
            assert refused_length(text, {"max_model_len": 1792})["max_model_len"].value == tokens


def test_refusal_of_a_length_that_we_did_not_set_is_not_ours():
    text = "The decoder prompt (length 3000) is longer than the maximum model length of 2048."
    assert refused_length(text, {"max_model_len": 1792}) == {}
    assert refused_length(text, {"max_num_seqs": 2048}) == {}
