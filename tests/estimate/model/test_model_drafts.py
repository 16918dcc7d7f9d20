"""Speculative decoding: vLLM's own configuration is read, and what it refuses is refused by name."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError
from oomguard.estimate.model.model import read_speculation


def test_each_method_is_read(subtests):
    for text, method, tokens, model, own in [
        (
            '{"model": "some/draft", "num_speculative_tokens": 5}',
            "draft_model",
            5,
            "some/draft",
            False,
        ),
        (
            '{"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3}',
            "eagle3",
            3,
            "some/head",
            False,
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}',
            "ngram",
            4,
            None,
            False,
        ),
        ('{"model": "ngram", "num_speculative_tokens": 4}', "ngram", 4, None, False),
        ('{"method": "mtp"}', "mtp", 1, None, True),
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 2}', "deepseek_mtp", 2, None, True),
    ]:
        with subtests.test(text=text, method=method, tokens=tokens, model=model, own=own):
            found = read_speculation(text)
            assert found is not None
            assert (found.method, found.tokens, found.model, found.uses_mtp_layers) == (
                method,
                tokens,
                model,
                own,
            )


def test_no_speculation_is_none():
    assert read_speculation(None) is None


def test_what_vllm_would_not_take_is_refused_by_name(subtests):
    for text, message in [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"model": "some/draft"}', "token count, got None"),
        ('{"model": "some/draft", "num_speculative_tokens": 0}', "token count, got 0"),
        (
            '{"model": "some/draft", "num_speculative_tokens": true}',
            "token count, got True",
        ),
        ('{"num_speculative_tokens": 5}', "hub name, got None"),
        ('{"model": ["a"], "num_speculative_tokens": 5}', r"hub name, got \['a'\]"),
    ]:
        with subtests.test(text=text, message=message), pytest.raises(SettingError, match=message):
            read_speculation(text)
