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
