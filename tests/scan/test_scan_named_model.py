"""The one model that a failure's lines name by its size, and what says that less of it is on the device."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.scan.scan import named_model

FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.56 GiB of which 7.81 MiB is free. Including non-PyTorch memory, this process has 14.55 GiB memory in use. Of the allocated memory 14.29 GiB is allocated by PyTorch, and 119.36 MiB is reserved by PyTorch but unallocated."


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("I ran Shop-7B-Instruct on a T4.", "Shop-7B-Instruct"),
        ("Shop 7B, then shop/Shop-7B-Chat again", "shop/Shop-7B-Chat"),
        ("Shop-7B or Shop-14B?", None),
        ("Shop-7B in 4-bit", None),
        ("Shop-7B-AWQ", None),
        ("Shop-7B with device_map='auto'", None),
        ("Shop-30B-A3B", None),
        ("Shop-7B on 4x A100", None),
        ("16GB of it, 3 GB free, 0b1101", None),
    ],
)
def test_one_size_that_is_whole_names_the_model(text: str, model: str | None) -> None:
    assert named_model(text) == model


def test_named_model_that_fills_the_device_is_below_0_8() -> None:
    cause = oomguard.diagnose(f"- Shop-7B-Instruct: {FULL}").incidents[0].causes[0]
    assert cause.id == "weights_do_not_fit"
    assert cause.confidence < 0.8


def test_a_model_that_other_lines_name_is_not_looked_at() -> None:
    assert (
        "stated_model"
        not in oomguard.diagnose(f"Shop-7B-Instruct was tried before\n{FULL}").incidents[0].facts
    )


def test_the_model_of_the_command_counts_over_one_that_is_named() -> None:
    text = f"python -m vllm.entrypoints.openai.api_server --model shop/Shop-1B\nShop-7B: {FULL}"
    assert "stated_model" not in oomguard.diagnose(text).incidents[0].facts
