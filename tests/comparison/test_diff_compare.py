"""The comparison as a whole: its headline, whether anything differs, and what it leaves open."""

from __future__ import annotations


def test_headline_has_versions_lost_memory_and_old_margin(compared, vllm):
    comparison = compared(vllm(pool="4.90"), vllm(version="0.21.0", fails=True, pool="3.00"))
    assert comparison.headline == (
        "0.12.0 -> 0.21.0: the KV cache lost 1.9 GiB; the start that worked left 0.9 GiB more than one request needs"
    )


def test_the_same_log_twice_tells_that_nothing_changed(compared, vllm):
    for log in (vllm(), vllm(fails=True)):
        comparison = compared(log, log)
        assert comparison.headline == "0.12.0, both: nothing changed in what the logs print"
        assert not comparison.differs
        assert not comparison.changes
        assert not comparison.explanations


def test_a_failure_alone_is_a_difference(compared, vllm):
    log = vllm()
    comparison = compared(
        log,
        log
        + "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. "
        "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.\n",
    )
    assert comparison.differs
    assert not comparison.changes
    assert comparison.headline.startswith("0.12.0, both: NEW fails: ")


def test_a_failure_of_another_kind_is_named_beside_the_kv_cache(compared, vllm):
    text = "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs`"
    comparison = compared(vllm(pool="4.75"), vllm(pool="5.75") + text)
    assert (
        comparison.headline
        == "0.12.0, both: the KV cache gained 1.0 GiB; NEW failed: sampler_warmup_oom"
    )


def test_a_start_that_works_again_is_told(compared, vllm):
    old = vllm(fails=True, pool="3.00")
    assert compared(old, vllm(pool="4.75")).headline == "0.12.0, both: the KV cache gained 1.8 GiB"


def test_unexplained_bytes_are_unknown_with_their_size(compared, vllm):
    comparison = compared(vllm(), vllm(fails=True, pool="2.75"))
    assert comparison.unknown[-1] == (
        "both logs' numbers leave 2.00 GiB less for the KV cache unexplained; only one log prints activations, CUDA graphs, non-torch"
    )


def test_what_the_parts_explain_leaves_nothing_unknown(compared, vllm):
    assert not compared(vllm(), vllm(weights="16.50", pool="3.25")).unknown


def test_a_log_that_lists_no_settings_is_named(compared, vllm):
    assert (
        "NEW does not list all settings of the user" in compared(vllm(), vllm(echo=False)).unknown
    )
