"""Secrets are hidden; counts of tokens and other everyday words are not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.report.mask import MASK, mask, mask_command


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("--api-key=abcdefgh", "--api-key=***"),
        ("api_key: 'abcdefgh'", "api_key: '***'"),
        ("'hf_token': 'abcdefgh'", "'hf_token': '***'"),
        ('"password": "abcdefgh"', '"password": "***"'),
        ("OPENAI_API_KEY=abcdefgh vllm serve", "OPENAI_API_KEY=*** vllm serve"),
        ("HF_TOKEN = abcdefgh", "HF_TOKEN = ***"),
        ("client-secret=abcdefgh", "client-secret=***"),
        (f"using hf_{'aB3' * 8} now", "using *** now"),
        (f"sk-{'a' * 24}", "***"),
        (f"ghp_{'a' * 24}", "***"),
        ("api_key=1234abcd", "api_key=***"),
    ],
)
def test_a_secret_is_hidden(text, hidden):
    assert mask(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "--max-num-batched-tokens 8192",
        "--max-num-batched-tokens=8192",
        "max_num_batched_tokens: 8192",
        "'max_num_batched_tokens': 8192, 'seed': 1",
        "max_new_tokens=128)",
        "GPU KV cache size: 2,013,440 tokens",
        "Maximum concurrency for 32,768 tokens per request: 61.45x",
        "tokenizer=org/model",
        "--tokenizer-mode auto",
        "the first token: it is late",
        "monkey=banana",
        "",
    ],
)
def test_what_is_no_secret_is_left_alone(text):
    assert mask(text) == text


@pytest.mark.parametrize("text", ["--api-key abcdefgh", "vllm serve m --hf-token abcdefgh --port 1"])
def test_a_secret_after_a_flag_in_running_text_is_hidden(text):
    assert "abcdefgh" not in mask(text)


def test_a_secret_in_the_list_of_vllm_s_echo_is_hidden():
    assert "abcdefgh" not in mask("non-default args: {'api_key': ['abcdefgh'], 'model': 'm'}")


@pytest.mark.parametrize("text", ["AWS_SECRET_ACCESS_KEY=abcdefgh", "Authorization: Bearer abcdefgh"])
def test_a_secret_of_another_name_is_hidden(text):
    assert "abcdefgh" not in mask(text)


@pytest.mark.parametrize("text", ["skip_special_tokens=True", "pad_token=<pad>", "eos_token: </s>", "hf_token=None"])
def test_a_token_of_the_vocabulary_is_no_secret(text):
    assert mask(text) == text


@pytest.mark.parametrize(
    ("argv", "masked"),
    [
        (["vllm", "--api-key", "abc"], ["vllm", "--api-key", MASK]),
        (["vllm", "--api-key=abcd"], ["vllm", f"--api-key={MASK}"]),
        (["env", "HF_TOKEN=abcd"], ["env", f"HF_TOKEN={MASK}"]),
        (["--max-num-batched-tokens", "8192", "m"], ["--max-num-batched-tokens", "8192", "m"]),
        (["--tokenizer", "org/m"], ["--tokenizer", "org/m"]),
        ([], []),
    ],
)
def test_the_secrets_of_a_command_are_hidden(argv, masked):
    assert mask_command(argv) == masked


@settings(deadline=None)
@given(st.text())
def test_masking_twice_is_masking_once(text):
    assert mask(mask(text)) == mask(text)


@settings(deadline=None)
@given(st.lists(st.text(max_size=20), max_size=8))
def test_a_masked_command_keeps_its_words(argv):
    assert len(mask_command(argv)) == len(argv)


@settings(deadline=None)
@given(
    name=st.sampled_from(["api_key", "--api-key", "HF_TOKEN", "db-password", "client_secret"]),
    secret=st.text("abcdefghijklmnop0123456789-_/+", min_size=8).filter(lambda text: not text[0].isdigit()),
)
def test_no_secret_after_an_equals_sign_is_left(name, secret):
    assert mask(f"{name}={secret}") == f"{name}={MASK}"
