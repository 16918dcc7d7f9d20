"""What no signature knows is told by the words of failing for memory, and only where nothing else was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomguard.diagnosing import default_rules, diagnose
from oomguard.observe.scan import scan
from oomguard.observe.source import Line
from oomguard.rules.load import RuleSet

ARENA = """2026-02-03 10:12:44 ERROR inference.arena: arena grow failed: not enough device memory for 3.50 GiB (1.25 GiB free)
2026-02-03 10:12:44 ERROR inference.main: worker exited
"""
KNOWN = "RuntimeError: CUDA error: out of memory\n"


def lines(text: str) -> list[Line]:
    return [Line(number, 0, line) for number, line in enumerate(text.splitlines(), 1)]


def test_a_failure_in_new_words_is_one_incident_with_its_certainty():
    (found,) = diagnose(ARENA).incidents

    assert (found.is_oom, found.location.line) == (True, 1)
    assert 0.7 <= found.certainty_ratio <= 1
    assert any("no signature has it" in text for text in found.unknown)


def test_the_cause_is_no_surer_than_that_anything_failed():
    (found,) = diagnose(ARENA).incidents

    assert all(cause.confidence <= found.certainty_ratio for cause in found.causes)


def test_sizes_are_read_whoever_prints_them():
    (found,) = diagnose("panicked at src/pool.rs:8: failed to allocate 2147483648 bytes on the device\n").incidents

    assert found.number("tried_bytes") == 2 << 30


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            (
                "ERROR pool: out of memory on GPU 0. Cannot allocate 25.50MB memory, 6.00GB memory has been allocated, "
                "available memory is only 15.25MB."
            ),
            {"tried_bytes": 26738688, "allocated_bytes": 6442450944, "device_free_bytes": 15990784},
        ),
        (
            (
                "EngineError: reserve refused, out of memory: this process has 75.00 GiB memory in use, 1.50 GiB is reserved by the "
                "arena but unallocated, 2.00 GiB allocated in private pools"
            ),
            {
                "process_in_use_bytes": 80530636800,
                "reserved_unallocated_bytes": 1610612736,
                "private_pool_bytes": 2147483648,
            },
        ),
        (
            "EngineError: alloc failed, purpose: page caching, type = 2, size:3221291008, device_id:0",
            {"tried_bytes": 3221291008},
        ),
        (
            "EngineError: not enough memory, failed to allocate 2.96G (3179741184 bytes) on the accelerator",
            {"tried_bytes": 3179741184},
        ),
        (
            "EngineError: out of device memory, failed to allocate: used 63.80G of 30.75G (gpu_memory_utilization=0.92, max_model_len=32768)",
            {
                "device_total_bytes": 33017561088,
                "gpu_memory_utilization_ratio": 0.92,
                "max_model_len_tokens": 32768,
            },
        ),
    ],
    ids=["in a sentence", "of the process", "by its name", "in bytes, which is exact", "of the device and of settings"],
)
def test_figures_are_read_by_what_stands_beside_them(text, facts):
    (found,) = diagnose(f"{text}\n").incidents

    assert {name: found.number(name) for name in facts} == facts


def test_the_number_of_a_device_is_no_size():
    (found,) = diagnose(
        "EngineError: out of memory on GPU 0, available again after 3 s; failed to allocate 4 GiB\n"
    ).incidents

    assert found.number("device_free_bytes") is None


def test_a_known_wording_silences_the_lexicon():
    (found,) = diagnose(KNOWN + ARENA).incidents

    assert (found.kind, found.certainty_ratio) == ("cuda_oom", None)


def test_only_a_scan_that_asks_for_it_weighs_words():
    assert scan(lines(ARENA), default_rules()).incidents == ()
    assert len(scan(lines(ARENA), default_rules(), new_wordings=True).incidents) == 1


def test_without_a_lexicon_nothing_is_weighed():
    rules = RuleSet(default_rules().signatures, (), ())

    assert scan(lines(ARENA), rules, new_wordings=True).incidents == ()


@pytest.mark.parametrize(
    "text",
    [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "google.api_core.exceptions.ResourceExhausted: 429 Quota exceeded for requests per minute",
        "warning: failed to mlock 104857600-byte buffer: Cannot allocate memory",
        "WARNING not enough memory for batch 64, retrying with 32",
        "vm.panic_on_oom = 0",
        "If the pool is too small, allocation may fail: consider a larger one.",
        "the bloom filter has room for 4096 keys",
        "ValueError: no free buffer slots left, 8 adapters are active",
        "RuntimeError: 9 rows exceed the metadata buffer's capacity of 8",
        "ERROR rank 3 did not answer in time. A peer may have failed (e.g., OOM) or be slow",
        "WARNING [place] Cannot allocate 12 pages in draft pool: free=4",
        "Not enough space on 1 to put lm_head (space available 524288000, module size 1050673152).",
    ],
)
def test_words_of_memory_without_a_failure_are_none(text):
    assert diagnose(text + "\n").incidents == ()


def test_nothing_is_told_beside_a_quoted_failure():
    quoted = '{"role": "user", "content": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}\n'

    assert diagnose(quoted + ARENA).incidents == ()
    assert len(diagnose(quoted + "a line\n" * 60 + ARENA).incidents) == 1


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("ERROR hipMalloc of the arena failed: not enough memory", "hip_oom"),
        ("ERROR the Metal heap could not be made: insufficient memory", "mps_oom"),
        ("ERROR cannot allocate 3 GiB of host RAM for the swap area", "host_oom"),
        ("ERROR arena: no memory left for 3 GiB", "other"),
    ],
)
def test_the_nearest_kind_is_told_by_what_the_line_names(words, kind):
    assert [found.kind for found in diagnose(words + "\nprogram aborted\n").incidents] == [kind]


def test_a_document_of_many_phrases_is_read_in_bounded_time():
    text = "ERROR arena grow failed: not enough device memory for 3.50 GiB\n" * 20_000

    assert len(diagnose(text).incidents) == 1


def test_a_least_certainty_above_one_tells_nothing():
    rules = default_rules()
    strict = replace(rules, lexicon=replace(rules.lexicon, least_ratio=1.1))

    assert scan(lines(ARENA), strict, new_wordings=True).incidents == ()


def test_a_message_that_says_what_was_asked_for_is_told_before_a_surer_one():
    text = """[pool] E allocator: allocation of 3221225472 bytes failed
worker.cc:81] pool exhausted
FATAL: worker exited: out of memory
"""
    (found,) = diagnose(text).incidents

    assert found.number("tried_bytes") == 3 << 30


def test_a_note_that_is_wrapped_amid_its_sentence_is_none():
    text = """W bfc_allocator.cc:219] Allocator (GPU_0_bfc) ran out of
memory trying to allocate 1.50GiB. The caller indicates that
this is not a failure, but may mean that there could be performance gains if more memory were available.
"""

    assert diagnose(text).incidents == ()


def test_what_backs_off_and_fits_is_no_failure():
    text = """runner: CUDA out of memory at batch size 32; backing off to 16
runner: batch size 16 fits
"""

    assert diagnose(text).incidents == ()


def test_an_allocator_s_report_without_its_message_is_a_failure():
    text = """I tensorflow/core/common_runtime/bfc_allocator.cc:696] 12 Chunks of size 4096 totalling 48.0KiB
I tensorflow/core/common_runtime/bfc_allocator.cc:700] Sum Total of in-use chunks: 1.50GiB
I tensorflow/core/common_runtime/bfc_allocator.cc:702] Stats:
Limit:                  8589934592
InUse:                  1610612736
"""
    (found,) = diagnose(text).incidents

    assert (found.kind, found.number("device_total_bytes"), found.number("allocated_bytes")) == (
        "xla_oom",
        8 << 30,
        1610612736,
    )
