"""Seed 001 in small: papers through `generate` in batches run out of memory; what was before, at
most during, and after.

    python examples/seed_papers.py [PLOT.png | TRACE.trace.json]

The model is a tiny Llama with random weights, the device a simulated one
(`oomguard.testing.limit_memory`): both run on any CPU. The seed's change, half of `max_new_tokens`,
is tried alone first, then `oomguard.guard`; `oomguard.watch` measures all of it. What the seed says
of Qwen3-32B is put beside `oomguard plan`.
"""

from __future__ import annotations

import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from plan_seeds import QWEN3_32B, saved
from seed_run import conclude, size, table
from transformers import LlamaConfig, LlamaForCausalLM

import oomguard
from oomguard.testing import limit_memory

PAPERS = 12
BATCH = 6
LONGEST_TOKENS = 384
ANSWER_TOKENS = 24
VOCABULARY = 1024
ENDS = list(
    range(3, 83)
)  # tokens that end an answer: random weights then give answers of many lengths
# Of what the largest batch takes, the part that the device has.
ROOM_RATIO = 0.7


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    widths = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, eos_token_id=ENDS, **widths
    )
    return LlamaForCausalLM(config).eval()


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Papers of different lengths, padded on the left to the longest of their batch."""
    lengths = random.Random(1).choices(range(LONGEST_TOKENS // 3, LONGEST_TOKENS + 1), k=PAPERS)
    batches = []
    for start in range(0, PAPERS, BATCH):
        of_batch = lengths[start : start + BATCH]
        ids = torch.zeros(len(of_batch), max(of_batch), dtype=torch.long)
        for row, length in enumerate(of_batch):
            ids[row, -length:] = torch.randint(max(ENDS) + 1, VOCABULARY, (length,))
        batches.append({"input_ids": ids, "attention_mask": (ids > 0).long()})
    return batches


def answers(
    model: LlamaForCausalLM, batches: list[dict[str, torch.Tensor]], tokens: int
) -> list[list[int]]:
    """Each paper's answer, up to the token that ends it."""
    found = []
    for batch in batches:
        for row in model.generate(**batch, max_new_tokens=tokens, do_sample=False)[
            :, batch["input_ids"].shape[1] :
        ]:
            answer = row.tolist()
            end = next((i + 1 for i, token in enumerate(answer) if token in ENDS), len(answer))
            found.append(answer[:end])
    return found


class Ran:
    """The job on a device of so many bytes: what it answered, what was seen, and how it ended."""

    def __init__(
        self, model, batches, capacity: int, *, tokens: int = ANSWER_TOKENS, guarded: bool = False
    ) -> None:
        self.answers: list[list[int]] | None = None
        self.seen = oomguard.watch()
        self.error = ""
        self.tokens = tokens
        with limit_memory(capacity) as device:
            device.adopt([*model.parameters(), *model.buffers()])  # as `model.to("cuda")` does
            try:
                with self.seen:
                    if guarded:
                        work = oomguard.guard(answers)
                    else:
                        work = answers
                    self.answers = work(model, batches, tokens)
            except torch.OutOfMemoryError as error:
                self.error = str(error).partition(" GPU 0")[0]
            self.peak = next(use for use in self.seen.uses if use.device == "simulated")

    def cells(self, label: str, expected: list[list[int]]) -> tuple[object, ...]:
        use = self.peak
        outcome = self.error
        if self.answers is not None:
            equal = sum(one == other for one, other in zip(self.answers, expected, strict=True))
            outcome = f"ran: {equal} of {len(expected)} answers whole"
        limit = size(use.limit_bytes or 0)
        return (
            label,
            self.tokens,
            limit,
            *map(size, (use.before_bytes, use.peak_bytes, use.after_bytes)),
            outcome,
        )


def parts(ran: Ran, model: LlamaForCausalLM) -> tuple[int, int, int]:
    """Weights, the largest batch's KV cache as the configuration gives it, and what else was there
    at the peak.
    """
    config = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    largest = max(
        (row.rows or 0) * ((row.prompt_tokens or 0) + ran.tokens) for row in ran.seen.rows
    )
    split = [
        int(t.attempt.settings["batch_size"])
        for row in ran.seen.rows
        for t in row.attempts
        if t.attempt.succeeded
    ]
    if split:  # what ran in parts holds the cache of a part
        largest = max(min(split) * ((row.prompt_tokens or 0) + ran.tokens) for row in ran.seen.rows)
    weights = ran.peak.before_bytes or 0
    cache = largest * token
    return weights, cache, (ran.peak.peak_bytes or 0) - weights - cache


def main() -> None:
    model = make_model()
    batches = make_batches()
    free = Ran(model, batches, 64 << 30)
    capacity = (free.peak.before_bytes or 0) + int(
        ROOM_RATIO * ((free.peak.peak_bytes or 0) - (free.peak.before_bytes or 0))
    )
    expected = free.answers or []
    failed = Ran(model, batches, capacity)
    halved = Ran(model, batches, capacity, tokens=ANSWER_TOKENS // 2)
    cut = Ran(model, batches, 64 << 30, tokens=ANSWER_TOKENS // 2)
    guarded = Ran(model, batches, capacity, guarded=True)

    head = ("", "new tokens", "device", "before", "at most", "after", "outcome")
    table(
        f"{PAPERS} papers in batches of {BATCH}, up to {LONGEST_TOKENS} tokens each: memory "
        "before, during and after",
        [
            head,
            free.cells("no limit", expected),
            failed.cells("as the seed had it", expected),
            halved.cells("the seed's change: half the tokens", expected),
            cut.cells("the same where there is room", expected),
            guarded.cells("with oomguard", expected),
        ],
    )
    print("\nWhat the watch saw of the last one:")
    print(guarded.seen)
    whole = parts(free, model)
    split = parts(guarded, model)
    table(
        "The seed's summary, measured",
        [
            ("", "needs", "with oomguard"),
            *(
                (name, size(whole[i]), size(split[i]))
                for i, name in enumerate(("weights", "KV cache", "activations"))
            ),
            ("total", size(sum(whole)), size(sum(split))),
            ("device", size(capacity), size(capacity)),
        ],
    )
    truncated = sum(len(answer) > cut.tokens for answer in expected)
    with saved(QWEN3_32B) as folder:
        call = oomguard.plan(
            folder,
            engine="transformers",
            gpu_memory="79.25GiB",
            prompt_tokens=8000,
            max_new_tokens=4096,
        )
    token = call.kv_bytes_per_token
    table(
        "The seed's account, and what was found",
        [
            ("what it says", "what was found"),
            (
                "fewer new tokens are enough",
                f"{truncated} of {PAPERS} answers are cut at {cut.tokens} tokens",
            ),
            (
                "half of them makes the room",
                f"peak {size(cut.peak.peak_bytes)} for {size(free.peak.peak_bytes)}",
            ),
            (
                "4096 tokens of Qwen3-32B: 6.4 GB",
                f"{size(4096 * token)}: {token >> 10} KiB a token, not 1.6 MiB",
            ),
            ("its weights: 72.22 GB", f"{size(call.weights_bytes)}: the rest was the call's own"),
            (
                "expandable segments, empty_cache",
                "132.54 MiB were kept unused, of 6.40 GiB that were asked for",
            ),
        ],
    )
    for path in sys.argv[1:]:
        (guarded.seen.to_png if path.endswith(".png") else guarded.seen.to_trace)(path)
    conclude(
        {
            "without oomguard the job runs out of memory": bool(failed.error),
            "half the new tokens cut answers": truncated > 0,
            "half the new tokens do not make the room": bool(halved.error),
            "with oomguard every answer is the one of a run without a limit": guarded.answers
            == expected,
            "the peak stays below the device's size": (guarded.peak.peak_bytes or 0) <= capacity,
            "a token of Qwen3-32B takes 256 KiB": token == 256 << 10,
        }
    )


if __name__ == "__main__":
    main()
