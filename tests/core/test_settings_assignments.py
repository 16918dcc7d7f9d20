"""``SETTING=VALUE`` as --min and --set take it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import SettingError
from oomguard.core.settings import SETTINGS, parse_assignment
from support.each import each


@each(
    ("text", "expected"),
    [
        ("max_model_len=8192", ("max_model_len", 8192)),
        (" --max-model-len = 8192 ", ("max_model_len", 8192)),
        ("dtype=a=b", ("dtype", "a=b")),
        ("max_model_len=8k", ("max_model_len", 8000)),
        ("max_model_len=8K", ("max_model_len", 8192)),
        ("max_num_batched_tokens=1.5m", ("max_num_batched_tokens", 1_500_000)),
        ("max_new_tokens=2G", ("max_new_tokens", 2 << 30)),
        ("kv_cache_memory_bytes=2g", ("kv_cache_memory_bytes", 2_000_000_000)),
        ("kv_cache_memory_bytes=1.5GiB", ("kv_cache_memory_bytes", 3 << 29)),
        ("cpu_offload_bytes=2g", ("cpu_offload_bytes", 2 << 30)),  # the engine's flag has GiB
    ],
)
def test_an_assignment_is_read(text, expected):
    assert parse_assignment(text) == expected


@each(
    "text",
    [
        "",
        "=",
        "max_model_len",
        "max_model_len=",
        "=8192",
        "max_model_len=a",
        "zzz=1",
        "max_model_len=1.5K",
    ],
)
def test_what_is_no_assignment_is_refused_with_a_message(text):
    with pytest.raises(SettingError) as caught:
        parse_assignment(text)

    assert str(caught.value)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_an_assignment_or_is_refused(text):
    try:
        name, _ = parse_assignment(text)
    except SettingError:
        return
    assert name in SETTINGS
