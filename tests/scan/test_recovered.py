"""What a program lived through is no failure: it says below the refusal what it does instead, or that it worked."""

from __future__ import annotations

import pytest

from oomguard.diagnosis import diagnose

REFUSED = "ERROR worker: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.24 GiB is free."
DIED = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.24 GiB is free."


@pytest.mark.parametrize(
    "below",
    [
        "WARNING worker: retrying with a smaller batch",
        "WARNING worker: Retrying with batch size 16",
        "INFO worker: trying again with 4 chunks",
        "WARNING worker: falling back to CPU offload",
        "INFO worker: backing off to 32",
        "INFO worker: reducing batch size to 8",
        "INFO worker: recovered from OOM after emptying the cache",
        "INFO worker: retry succeeded",
    ],
)
def test_what_is_done_instead_makes_a_refusal_no_failure(below):
    assert (
        diagnose(f"INFO worker: step 7\n{REFUSED}\n{below}\nINFO worker: step 8").verdict
        == "no_oom"
    )
    assert diagnose(f"INFO worker: step 7\n{REFUSED}\nINFO worker: step 8").verdict == "oom"


@pytest.mark.parametrize(
    "below",
    [
        "WARNING supervisor: worker died, retrying in 5 s",
        "INFO supervisor: restarting worker",
        "WARNING urllib3: Retrying (Retry(total=2, connect=None)) after connection broken",
        "ERROR worker: retrying with batch size 1 failed, giving up",
        "ERROR worker: falling back to CPU offload failed: no such module",
        "ERROR worker: could not recover",
    ],
)
def test_the_same_thing_once_more_or_in_vain_is_none(below):
    assert diagnose(f"{REFUSED}\n{below}\nINFO worker: step 8").verdict == "oom"


def test_what_fails_after_it_was_tried_another_way_is_a_failure():
    log = f"{REFUSED}\nWARNING worker: retrying with batch size 1\n{DIED}\n"

    assert diagnose(log).first_cause.facts["tried_bytes"].value == 6 * 2**30


def test_distant_word_of_another_process_is_unrelated():
    far = "\n".join(f"INFO worker: step {i}" for i in range(40))

    assert diagnose(f"{REFUSED}\n{far}\nINFO loader: falling back to CPU offload").verdict == "oom"
