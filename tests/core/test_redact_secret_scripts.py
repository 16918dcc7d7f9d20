"""Of a program in one word of a command the secrets are hidden, to the end of the shell's word, and nothing else."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.redact import hides_secrets_alone, mask_command


def test_a_secret_ends_where_the_shell_s_word_ends():
    for script, masked in [
        ("export API_KEY=aaa; sh job.sh", "export API_KEY=***; sh job.sh"),
        ("API_KEY=aaa; sh job.sh", "API_KEY=***; sh job.sh"),
        ("export HF_TOKEN=hf_abc && true serve m", "export HF_TOKEN=*** && true serve m"),
        ("API_KEY='a b' PASSWORD=x\"y z\"'w' serve m", "API_KEY=*** PASSWORD=*** serve m"),
        ("PASSWORD=a\\ b|serve m\nX=1", "PASSWORD=***|serve m\nX=1"),
        (
            "HF_TOKEN=$(cat a b) serve --api-key ab'c'd --port 1",
            "HF_TOKEN=*** serve --api-key *** --port 1",
        ),
        ("sh -c 'API_KEY=aaa' && serve m", "sh -c 'API_KEY=***' && serve m"),
        (
            "serve --max-num-batched-tokens=8192 --tokenizer m",
            "serve --max-num-batched-tokens=8192 --tokenizer m",
        ),
        ("PASSWORD='cut off; serve m", "PASSWORD=***"),
    ]:
        for program in (["bash", "-c"], ["/bin/sh", "-lc"], ["python3.11", "-c"]):
            assert mask_command([*program, script]) == [*program, masked], (script, masked)
        assert hides_secrets_alone(["sh", "-c", script], ["sh", "-c", masked]), (script, masked)


@pytest.mark.parametrize(
    "argv",
    [
        ["env", "HF_TOKEN=two words"],
        ["ssh", "host", "API_KEY=aaa; sh job.sh"],
    ],
)
def test_possible_whole_argument_is_masked_and_distinguished(
    argv: list[str],
):
    masked = mask_command(argv)

    assert masked[-1].endswith("=***")
    assert not hides_secrets_alone(argv, masked)


def test_what_is_whole_words_is_secrets_alone():
    for argv in [
        ["env", "HF_TOKEN=aaa"],
        ["serve", "--api-key", "two words; of a secret"],
        ["bash", "-c", "gen --prompt 'hello; you' --n 1"],
        ["curl", "-H", "Authorization: Bearer abcdefgh", "https://user:secret@host/x"],
        ["serve", "m"],
    ]:
        assert hides_secrets_alone(argv, mask_command(argv)), argv


SECRETS = st.text("abcXYZ019'\"$ ;&|()\\\n=*", min_size=6, max_size=12).map(
    lambda text: f"Zq7{text}Zq7"
)


@settings(deadline=None)
@given(
    secret=SECRETS,
    key=st.sampled_from(["export API_KEY=", "HF_TOKEN=", "serve --api-key=", "serve --hf-token "]),
)
def test_quoted_secret_is_masked_whole_and_the_rest_stays(secret: str, key: str):
    word = shlex.quote(secret)
    (_shell, _c, masked) = mask_command(["sh", "-c", f"{key}{word}; sh job.sh --n 1"])

    assert masked == f"{key}***; sh job.sh --n 1"
