"""How many tokens of prompts to compute in one step: so many that the tensor which was refused fits in what was free.

What a step of prompts makes is linear in its tokens: activations, logits, scores against the whole context. With fewer of them the
others of the step take less as well, so what was free then is the least that there will be.
"""

from __future__ import annotations

from typing import Final

from oomguard.facts import format_gib
from oomguard.incident import Incident
from oomguard.remedy.solution import Solution

# What is free moves by as much from step to step.
_MARGIN_RATIO: Final = 0.1
# Whole pages and whole tiles of the kernels.
_MULTIPLE_TOKENS: Final = 256
# Below so many a step is mostly overhead, and what is too large is something else.
_LEAST_TOKENS: Final = 512
# vLLM makes float32 logits of a prompt and then as large a tensor of their log-probabilities: vllm/v1/worker/gpu_model_runner.py
# _get_prompt_logprobs_dict, 0.33.0. The log does not show which of the two failed.
_OF_VLLM_LOGPROBS: Final = 2
_OF_A_PROMPT: Final = ("prefill", "prompt_logprobs")


def step_tokens_for_tried(incident: Incident) -> Solution:
    """Compute so many tokens of prompts in one step that the refused tensor fits in what was free: tokens x free / tried x 0.9."""
    limit, ran = incident.number("max_num_batched_tokens"), incident.number("step_tokens")
    tried, free = incident.number("tried_bytes"), incident.number("device_free_bytes")
    lever = "shrinks the activations of a step"
    if incident.phase not in _OF_A_PROMPT:
        missing = "peak activation: not printed"
        return Solution(None, f"{lever}; by how much is not known ({missing})", unknown=(missing,))
    if "multimodal_frames" in incident.facts:
        return Solution(None, "an encoder takes an image whole, however long a step is")
    tokens = min((number for number in (limit, ran) if number), default=None)
    figures = {"how many tokens were in the step": tokens, "tried": tried, "device free": free}
    missing_names = tuple(f"{name}: not printed" for name, number in figures.items() if number is None)
    if not tokens or not tried or free is None:
        return Solution(None, f"{lever}; by how much is not known ({', '.join(missing_names)})", unknown=missing_names)
    if free >= tried:
        return Solution(None, f"{format_gib(free)} was free for {format_gib(tried)}: a step is not what is too large")
    still_wanted = tried * _OF_VLLM_LOGPROBS if _is_of_vllm_logprobs(incident) else tried
    value = int(tokens * free / still_wanted * (1 - _MARGIN_RATIO)) // _MULTIPLE_TOKENS * _MULTIPLE_TOKENS
    if value < _LEAST_TOKENS:
        return Solution(None, f"a step of {tokens:g} tokens asked for {format_gib(tried)} with {format_gib(free)} free")
    reason = f"{format_gib(tried)} for {tokens:g} tokens in one step; {format_gib(free)} was free"
    return Solution(value, reason, round(tried * (1 - value / tokens)))


def _is_of_vllm_logprobs(incident: Incident) -> bool:
    return incident.framework == "vllm" and incident.phase == "prompt_logprobs"
