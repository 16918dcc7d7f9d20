"""A planned start as text: the parts add up to the device, the command is what a shell takes."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from packaging.version import Version
from rich.console import Console

from oomguard.core.facts import GIB
from oomguard.estimate.start.start import Stage, StartBudget, VllmSettings
from oomguard.planning.start import StartPlan
from oomguard.report.json import json_line
from oomguard.report.plan import budget_of, plan_record, print_start_plan

SETTINGS = VllmSettings(
    version=Version("0.30"),
    gpu_total_bytes=24 * GIB,
    gpu_memory_utilization=0.9,
    max_model_len=4096,
)
BUDGET = StartBudget(
    model="./my model",
    settings=SETTINGS,
    requested_bytes=21 * GIB,
    weights_bytes=15 * GIB,
    draft_weights_bytes=0,
    lora_bytes=0,
    peak_activation_bytes=GIB,
    compile_bytes=0,
    page_cache_bytes=0,
    cudagraph_bytes=GIB,
    non_torch_bytes=GIB // 4,
    not_free_bytes=GIB // 2,
    prompt_logprobs_bytes=0,
    kv_cache_pool_bytes=5 * GIB,
    kv_bytes_per_token=131072,
    kv_cache_blocks=2560,
    block_tokens=16,
    kv_cache_tokens=40960,
    max_concurrency=10.0,
    longest_request_tokens=4096,
    uncertainty_bytes=GIB // 10,
    stages=(Stage(0, 15 * GIB, GIB, 5 * GIB, GIB // 2),),
    assumptions=("a thing",),
    reasons=(),
)


def shown(budget: StartBudget, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    print_start_plan(Console(file=out, width=80), StartPlan(budget, "vllm serve x"))
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def test_the_parts_add_up_to_the_device():
    assert sum(part.bytes for part in budget_of(BUDGET).parts) == 24 * GIB


def test_a_pool_below_zero_is_no_part():
    assert "KV cache" not in {
        part.name for part in budget_of(replace(BUDGET, kv_cache_pool_bytes=-GIB)).parts
    }


def test_the_record_is_strict_json():
    assert json.loads(json_line(plan_record(StartPlan(BUDGET, None))))["max_concurrency"] == 10.0


def test_the_page_says_what_fits_and_what_was_assumed():
    text = shown(BUDGET)
    assert text.splitlines()[0].startswith("fits: ")
    assert "assumed: a thing" in text
    assert "40,960 in 2,560 blocks of 16" in text


def test_why_it_does_not_fit_stands_beside_the_verdict():
    assert "does not fit: one reason; another" in shown(
        replace(BUDGET, reasons=("one reason", "another"))
    )


def test_prompt_logprobs_differ_from_what_a_start_reserves():
    assert "prompt logprobs take up to 2.00 GiB more" in shown(
        replace(BUDGET, prompt_logprobs_bytes=2 * GIB)
    )


def test_an_ascii_terminal_gets_ascii():
    assert shown(BUDGET, "ascii").isascii()
