"""What vLLM's own classes allocate at their start has just the bytes that the rows of allocations.toml say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from oomguard.estimate.start.failed_allocation import allocations, name_allocation
from oomguard.estimate.start.weights import lora_bytes

SCRIPT = Path(__file__).with_name("scripts") / "allocations.py"
# As in the script; a request of 4999 tokens has 313 blocks of 16, padded to 128 tokens.
NUMBERS = {
    "dtype": 2,
    "max_num_seqs": 7,
    "max_model_len": 4999,
    "blocks_per_request": 320,
    "blocks_unpadded": 313,
    "max_loras": 3,
    "max_lora_rank": 8,
    "vocabulary": 1009,
    "hidden": 61,
    "ngram": 1,
    "enable_lora": 1,
}


@pytest.fixture(scope="module")
def made(vllm_env, tmp_path_factory):
    run = subprocess.run(
        ["python", str(SCRIPT)],
        cwd=tmp_path_factory.mktemp("allocations"),
        env=vllm_env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["ngram_rows", "request_blocks"])
def test_request_tables_are_the_product_of_their_row(made, name):
    row = next(row for row in allocations() if row.name == name)
    assert name_allocation(made[name], 0.0, NUMBERS, "load_weights").product.allocation == row


def test_slots_around_the_layers_are_as_counted(made):
    around = lora_bytes(
        (),
        1,
        1,
        slots=3,
        rank=8,
        tensor_parallel_size=1,
        element_bytes=2,
        around_elements=1009 + 61,
    )
    assert sum(made["embedding"]) + sum(made["head"]) == around[0]
    assert (
        name_allocation(made["embedding"][0], 0.0, NUMBERS, "load_weights").product.allocation.name
        == "lora_slots"
    )
