"""What explains a change, and in which order."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB


def texts(comparison) -> list[str]:
    return [explanation.text for explanation in comparison.explanations]


def test_cuda_graph_estimate_reduces_the_pool_since_0_20(compared, vllm):
    comparison = compared(
        vllm(version="0.12.0"), vllm(version="0.21.0", fails=True, graphs="1.50", pool="3.25")
    )
    first = comparison.explanations[0]
    assert first.kv_cache_bytes == -1.5 * GIB
    assert "1.50 GiB less for it" in first.text
    assert "0.50 GiB in OLD" in first.text


def test_no_estimate_is_blamed_where_none_was_switched_on(subtests, compared, vllm):
    for old, new, eager in [
        ("0.12.0", "0.19.1", False),
        ("0.20.0", "0.21.0", False),
        ("0.12.0", "0.21.0", True),
    ]:
        with subtests.test(old=old, new=new, eager=eager):
            comparison = compared(vllm(version=old), vllm(version=new, fails=True, eager=eager))
            assert not [text for text in texts(comparison) if text.startswith("Since 0.20")]


def test_a_moved_default_gives_its_share_of_the_device(compared, vllm):
    comparison = compared(vllm(version="0.19.1", total="20.00"), vllm(version="0.21.0", fails=True))
    (found,) = [
        e
        for e in comparison.explanations
        if e.text.startswith("gpu_memory_utilization 0.9 -> 0.92")
    ]
    assert "the default moved with the version" in found.text
    assert found.kv_cache_bytes == pytest.approx(0.02 * 20 * GIB)


def test_weights_that_grew_are_told_with_what_made_them_grow(compared, vllm):
    (text,) = texts(
        compared(
            vllm(weights="7.50", pool="12.25"),
            vllm(dtype="torch.float32", more=", 'dtype': 'float32'"),
        )
    )
    assert text == "The weights take 7.50 GiB more (dtype bfloat16 -> float32)."


def test_other_process_is_recognized_by_free_memory_at_start(compared, vllm):
    failed = vllm(fails=True).splitlines()[1] + (
        "\nERROR 09-04 09:00:10 [core.py:800] ValueError: Free memory on device (9.64/23.64 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 21.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
    )
    (text,) = [text for text in texts(compared(vllm(), failed)) if "process" in text]
    assert (
        text
        == "Another process holds more now: 14.00 GiB of the device was in use before NEW started, 0.39 GiB before OLD."
    )


def test_the_two_generations_of_vllm_come_first(compared, vllm):
    comparison = compared(
        vllm(version="0.7.3"), vllm(version="0.11.0", weights="16.00", pool="3.75")
    )
    assert "V0 engine" in texts(comparison)[0]
    assert "V0 engine" not in "".join(
        texts(compared(vllm(version="0.11.0"), vllm(version="0.12.0")))
    )


def test_two_engines_are_named_and_not_explained_by_parts(compared, vllm, sglang):
    comparison = compared(vllm(), sglang())
    (text,) = texts(comparison)
    assert text.startswith("vllm and sglang are different engines")
    assert comparison.headline == "vllm 0.12.0 -> sglang: different engines"


def test_sglang_share_is_of_the_memory_free_before_loading(compared, sglang):
    (explanation,) = compared(sglang(0.88, 3.41), sglang(0.95, 4.22)).explanations
    assert explanation.text == (
        "mem_fraction_static 0.88 -> 0.95: the engine may take 1.62 GiB more of 23.20 GiB."
    )


def test_less_free_memory_before_loading_is_told_for_sglang(compared, sglang):
    found = texts(compared(sglang(), sglang(free="13.20", pool=3.01)))
    assert found == [
        "10.00 GiB less was free before NEW loaded anything: 13.20 GiB, 23.20 GiB in OLD."
    ]


def test_part_in_one_log_only_is_suspected_if_settings_changed(compared, vllm):
    chunk = "INFO 01-15 09:12:09 [scheduler.py:228] Chunked prefill is enabled with max_num_batched_tokens={}.\n"
    comparison = compared(
        chunk.format(2048) + vllm(), chunk.format(8192) + vllm(fails=True, pool="3.75")
    )
    (text,) = [text for text in texts(comparison) if "activations" in text]
    assert text.endswith("a setting that affects it changed (max_num_batched_tokens 2048 -> 8192).")


def test_a_longer_context_raises_what_one_request_needs(compared, vllm):
    comparison = compared(vllm(), vllm(length=65536, need="8.0", fails=True))
    (text,) = [text for text in texts(comparison) if "full request" in text]
    assert (
        text
        == "One full request needs 8.00 GiB of KV cache, 4.00 GiB in OLD (max_model_len 32768 -> 65536)."
    )


def test_the_largest_effect_on_the_kv_cache_is_told_first(compared, vllm):
    comparison = compared(
        vllm(weights="8.00", activations="1.00"), vllm(activations="1.50", pool="3.00")
    )
    assert [e.kv_cache_bytes for e in comparison.explanations] == [-7 * GIB, -0.5 * GIB]


def test_kv_cache_of_a_given_size_ignores_the_other_parts(compared, vllm):
    comparison = compared(
        vllm(), vllm(more=", 'kv_cache_memory_bytes': 2147483648", pool="2.00", weights="16.00")
    )
    assert comparison.explanations[0].text == (
        "The KV cache's size is 2.00 GiB as the user set it in NEW, left to the utilization in OLD."
    )
    assert [e.kv_cache_bytes for e in comparison.explanations] == [-2.75 * GIB, None]
