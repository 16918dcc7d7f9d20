"""Run ``generate`` under fake tensors in a child process.

The process reads one JSON object on standard input and prints one: the bytes of the weights, the
peak of each step, and the allocations in order.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from oomguard.estimate.call.fake_generate import FakeModel, trace_call
from oomguard.estimate.call.trace import TracedSteps
from oomguard.estimate.model.parameters import auto_config


def trace(asked: dict[str, Any]) -> TracedSteps:
    """Trace one call; ``asked`` has the model's configuration and the call's numbers."""
    if asked["cache_implementation"]:
        options = {"cache_implementation": asked["cache_implementation"]}
    else:
        options = {}
    with FakeTensorMode() as mode:
        model = AutoModelForCausalLM.from_config(
            auto_config(asked["config"]),
            attn_implementation=asked["attn_implementation"],
            dtype=getattr(torch, asked["dtype"]),
            trust_remote_code=False,
        ).eval()
    rows = asked["batch_size"]
    length = asked["prompt_tokens"]
    arguments = {
        "input_ids": torch.ones((rows, length), dtype=torch.long),
        "attention_mask": torch.ones((rows, length), dtype=torch.long),
        "max_new_tokens": asked["max_new_tokens"],
        "do_sample": False,
        "num_beams": asked["num_beams"],
        "pad_token_id": 0,
        "eos_token_id": None,
        **options,
    }
    return trace_call(
        FakeModel(model, mode),
        arguments,
        asked["max_new_tokens"],
        mask_is_full=True,
        keep_events=True,
    )


def main() -> None:
    """Trace the call from standard input."""
    print(json.dumps(asdict(trace(json.load(sys.stdin)))))  # noqa: T201 - the answer to the parent
