"""Which start of a log is compared, and what it is known by."""

from __future__ import annotations

import pytest

from oomguard.core.errors import InputError
from oomguard.core.facts import GIB

MEANWHILE = "INFO [launcher.py:1] waiting for the next start\n" * 20


def test_the_last_start_with_figures_is_taken(side, vllm):
    log = (
        vllm(version="0.12.0", fails=True)
        + MEANWHILE
        + vllm(version="0.13.0")
        + "INFO [gpu_worker.py:1] nothing\n"
    )
    chosen = side(log)
    assert chosen.start.number == 2
    assert chosen.version == "0.13.0"
    assert chosen.starts == 2


def test_last_start_without_figures_gives_way_to_the_one_before(side, vllm):
    cut = "".join(vllm(version="0.13.0").splitlines(keepends=True)[:2])
    assert side(vllm(fails=True) + MEANWHILE + cut).version == "0.12.0"


def test_a_start_can_be_asked_for_by_its_number(side, vllm):
    log = vllm(fails=True) + MEANWHILE + vllm(version="0.13.0")
    assert side(log, 1).incident.kind == "kv_cache_too_small_for_max_len"
    assert side(log, 2).incident is None


def test_missing_run_number_is_refused_with_the_existing_ones(side, vllm):
    with pytest.raises(InputError, match="no start 7") as error:
        side(vllm(fails=True) + MEANWHILE + vllm(), 7)
    assert error.value.hint == "it has the starts 1, 2"


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 1 MiB is free.\n"


def test_log_without_an_engine_start_is_refused(subtests, side):
    for text in ["", "hello\n", OOM]:
        with subtests.test(text=text):
            with pytest.raises(InputError, match="no start of an engine") as error:
                side(text)
            assert "Initializing a V1 LLM engine" in error.value.hint


def test_a_message_pasted_alone_is_a_start_known_by_its_failure(side, vllm):
    chosen = side(vllm(fails=True, pool="3.25").splitlines()[-1])
    assert chosen.start.line is None
    assert chosen.start.framework == "vllm"
    assert chosen.number("kv_cache_available_bytes") == 3.25 * GIB
    assert chosen.number("kv_cache_needed_bytes") == 4 * GIB


def test_the_failure_fills_what_the_start_did_not_print(side, vllm):
    assert side(vllm(fails=True)).number("kv_cache_needed_bytes") == 4 * GIB


def test_one_requests_need_follows_from_pool_and_tokens(side, vllm):
    chosen = side(vllm(pool="8.00", need="4.0"))
    assert chosen.number("kv_cache_needed_bytes") == pytest.approx(4 * GIB, rel=1e-3)
    assert chosen.number("max_concurrency") == pytest.approx(2, rel=1e-3)


def test_tokens_follow_from_the_blocks_of_the_first_engine(side):
    log = (
        "INFO 03-04 09:00:08 llm_engine.py:234] Initializing an LLM engine (v0.5.4) with config: model='org/m', dtype=torch.float16, max_seq_len=4096\n"
        "INFO 03-04 09:00:22 gpu_executor.py:76] # GPU blocks: 832, # CPU blocks: 512\n"
    )
    assert side(log).number("kv_cache_capacity_tokens") == 832 * 16


def test_what_a_failed_start_had_not_taken_yet_is_not_free(side, vllm):
    log = vllm(fails=True) + OOM
    assert "free" not in {part.name for part in side(log).start.budget.parts}
