"""What somebody names as the cause beside a failure that they wrote down."""

from __future__ import annotations

import pytest

import oomguard

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
FULL = (
    OOM
    + " GPU 0 has a total capacity of 79.25 GiB of which 10.00 MiB is free. Process 7 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has 19.00 GiB memory in use."
)


def first(text: str):
    """Return the first cause of the first incident of a text."""
    return oomguard.diagnose(text).incidents[0].causes[0]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("A stale EngineCore process still held 51 GiB.", "colocated_process"),
        ("The model is too large for this card.", "weights_do_not_fit"),
        ("It happened in the first training step.", "training"),
        ("Context grows linearly with the steps.", "max_new_tokens_or_context_too_long"),
        ("Full resolution was attempted first.", "batch_too_large"),
        ("It failed after 12 hours.", "leaked_or_unreleased_memory"),
        ("The second server fails to start on it.", "colocated_process"),
        ("This 8GB card could not load it.", "weights_do_not_fit"),
        ("Why does my distributed (4-GPU) training OOM?", "training"),
        ("The prompt has about 90k tokens.", "max_new_tokens_or_context_too_long"),
        ("At bs=48 the first batch OOMs.", "batch_too_large"),
        ("Every round retains memory until the cap.", "leaked_or_unreleased_memory"),
    ],
)
def test_a_cause_told_above_or_below_the_message_is_named_below_0_8(said: str, cause: str) -> None:
    above, below = first(f"{said}\n{OOM}"), first(f"{OOM}\n{said}")
    assert above.id == below.id == cause
    assert max(above.confidence, below.confidence) < 0.8


def test_the_sentence_is_the_evidence() -> None:
    incident = oomguard.diagnose(f"It failed after 12 hours.\n{OOM}").incidents[0]
    assert any("after 12 hours" in evidence.text for evidence in incident.evidence)


def test_figures_decide_over_what_is_told() -> None:
    assert first(f"It failed after 12 hours.\n{FULL}").id == "colocated_process"


def test_advice_inside_the_message_names_no_cause() -> None:
    text = f"{OOM} Decrease GPU memory utilization or reduce GPU memory used by other processes."
    assert "told_cause" not in oomguard.diagnose(text).incidents[0].facts


def test_what_stands_far_from_the_message_is_not_told_of_it() -> None:
    assert first("It failed after 12 hours.\n" + "step done\n" * 40 + OOM).id == "unknown"


@pytest.mark.parametrize(
    "said",
    [
        "This happens during inference, not during training.",
        "Make sure that no other process is using the GPU.",
        "Even with a batch size of 2 it fails.",
        "This model's maximum context length is 4096 tokens.",
        "You can lower the batch size to avoid it.",
    ],
)
def test_what_is_denied_or_advised_is_not_told(said: str) -> None:
    assert "told_cause" not in oomguard.diagnose(f"{said}\n{OOM}").incidents[0].facts


FRAMES = "\n".join(
    f'  File "/site-packages/shop/layers.py", line {n}, in forward\n    x = self.step_{n}(x)' for n in range(30)
)


def test_a_sentence_above_a_long_traceback_and_a_title_are_told_of_its_failure() -> None:
    asked = f"Why does my distributed training OOM?\nTraceback (most recent call last):\n{FRAMES}\n{OOM}"
    titled = "[Bug]: OOM when finetuning on two cards\n\n" + "It ran once.\n" * 30 + OOM
    assert first(asked).id == first(titled).id == "training"


def test_what_is_said_decides_over_figures_that_fit_several_causes() -> None:
    pieces = (
        OOM
        + " GPU 0 has a total capacity of 79.19 GiB of which 14.75 MiB is free. Process 7 has 79.17 GiB memory in use. Of the"
        " allocated memory 71.69 GiB is allocated by PyTorch, and 5.93 GiB is reserved by PyTorch but unallocated."
    )
    mps = "RuntimeError: MPS backend out of memory (MPS allocated: 42.28 GiB, other allocations: 720.00 KiB, max allowed: 42.43 GiB). Tried to allocate 384.00 MiB on shared pool."
    assert (first(pieces).id, first(f"It ran out of memory in the first training step.\n{pieces}").id) == (
        "fragmentation",
        "training",
    )
    assert (first(mps).id, first(f"Every round retains memory until the cap.\n{mps}").id) == (
        "weights_do_not_fit",
        "leaked_or_unreleased_memory",
    )
