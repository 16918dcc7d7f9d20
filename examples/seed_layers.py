"""Seed 003: a sweep over layers that generated anew for each layer, and ran out of memory beside
it. `oomguard.map` does each thing once.

    python examples/seed_layers.py

A tiny Llama with random weights on a simulated device: 200 completions of one prompt are sampled,
then the activations of eight layers are taken from them, then the sweep is run again. Batches of 64
do not fit; nobody set a smaller one.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from seed_run import MIB, conclude, size, table
from transformers import LlamaConfig, LlamaForCausalLM

import oomguard
from oomguard.testing import limit_memory

PROMPT = "A paper of 2024 reports 24 participants. " * 4
COMPLETIONS = 200
NEW_TOKENS = 12
BATCH = 64
LAYERS = range(4, 12)
CAPACITY = 32 * MIB
SAID = {"model": "tiny-llama", "revision": "random, seed 0"}
SAMPLING = {"temperature": 0.7, "max_new_tokens": NEW_TOKENS, "seed": 0}


@dataclass
class Seen:
    """What the functions saw of the device, and how often they were called."""

    device: object = None
    peak_bytes: int = 0
    generated: int = 0
    passes: int = 0

    def note(self) -> None:
        if self.device is not None:
            self.peak_bytes = max(self.peak_bytes, self.device.peak_bytes)


seen = Seen()
torch.set_num_threads(1)  # several would wait for one another on a small model


@functools.cache
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def generate(prompts: list[str]) -> list[list[int]]:
    """Return the prompt's tokens and the sampled ones behind them."""
    ids = torch.tensor([list(prompt.encode()) for prompt in prompts])
    options = {
        "do_sample": True,
        "temperature": SAMPLING["temperature"],
        "max_new_tokens": NEW_TOKENS,
    }
    tokens = model().generate(ids, attention_mask=torch.ones_like(ids), **options)
    seen.note()
    seen.generated += len(prompts)
    return tokens.tolist()


@torch.inference_mode()
def activations(texts: list[list[int]], *, layer: int) -> torch.Tensor:
    """Return what a layer makes of the last token of each text."""
    hidden = model().model(torch.tensor(texts), output_hidden_states=True).hidden_states
    seen.note()
    seen.passes += len(texts)
    return hidden[layer][:, -1]


@torch.inference_mode()
def activations_of_all(texts: list[list[int]]) -> list[dict[int, torch.Tensor]]:
    """Return the same of all eight layers, from one pass."""
    hidden = model().model(torch.tensor(texts), output_hidden_states=True).hidden_states
    seen.passes += len(texts)
    return [{layer: hidden[layer][row, -1] for layer in LAYERS} for row in range(len(texts))]


def sweep(store: Path) -> list[dict]:
    """Do for each layer what the seed's script did: complete the prompts, take the layer's
    activations.
    """
    rows = []
    for layer in LAYERS:
        began_s = time.monotonic()
        seen.peak_bytes = 0
        texts = oomguard.map(
            generate,
            [PROMPT] * COMPLETIONS,
            store=store,
            identity=SAID | SAMPLING,
            batch_size=BATCH,
        )
        of_layer = functools.partial(activations, layer=layer)
        vectors = oomguard.map(
            of_layer, texts, store=store, identity=SAID | SAMPLING, batch_size=BATCH
        )
        attempts = len(texts.attempts) + len(vectors.attempts)
        took_s = time.monotonic() - began_s
        rows.append(
            {"layer": layer, "texts": texts, "vectors": vectors, "attempts": attempts, "s": took_s}
        )
        rows[-1]["peak_bytes"] = seen.peak_bytes
    return rows


def shown(name: str, row: dict) -> list[object]:
    texts = row["texts"]
    vectors = row["vectors"]
    computed = [texts.computed, texts.reused, vectors.computed, vectors.reused]
    if row["peak_bytes"]:
        peak = size(row["peak_bytes"])
    else:
        peak = "nothing ran"
    return [name, row["layer"], *computed, row["attempts"] or "", peak, f"{row['s']:.1f} s"]


def fails_whole() -> str:
    """What a batch of 64 does on the device without any of this."""
    with limit_memory(CAPACITY):
        try:
            generate([PROMPT] * BATCH)
        except torch.OutOfMemoryError as error:
            return str(error).split(" GPU 0")[0]
    return "ran"


def main() -> None:
    logging.getLogger("oomguard").setLevel(logging.ERROR)
    failure = fails_whole()
    seen.generated = 0
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "sweep.sqlite"
        with limit_memory(CAPACITY) as device:
            seen.device = device
            first = sweep(store)
            passes = seen.passes
            generated = seen.generated
            second = sweep(store)
            seen.device = None
        again = (seen.passes - passes, seen.generated - generated)
        with limit_memory(CAPACITY):
            at_once = oomguard.map(
                activations_of_all, first[0]["texts"], store=store, identity=SAID, batch_size=BATCH
            )
        one_pass = seen.passes - passes
        store_bytes = store.stat().st_size
        distinct = len({tuple(text) for text in first[0]["texts"]})
        same = all(
            torch.equal(vector, whole[layer])
            for layer, row in zip(LAYERS, first, strict=True)
            for vector, whole in zip(row["vectors"], at_once, strict=True)
        )
        expected = activations(list(first[0]["texts"]), layer=LAYERS[0])
        alike = torch.allclose(torch.stack(list(first[0]["vectors"])), expected, atol=1e-6)
    print(f"Without: generate on a batch of {BATCH}: {failure}")
    table(
        f"A sweep over eight layers, {COMPLETIONS} completions of one prompt, a device of "
        f"{size(CAPACITY)}",
        [
            [
                "",
                "layer",
                "generated",
                "reused",
                "activations",
                "reused",
                "attempts",
                "peak",
                "took",
            ],
            *(shown("first sweep", row) for row in first),
            *(shown("second sweep", row) for row in second),
        ],
    )
    table(
        "The seed's account, and what was found",
        [
            ["what it says", "what was found"],
            [
                "each layer generates anew, without a cache",
                f"{generated} generated for eight layers, {again[1]} in the second sweep",
            ],
            ["200 equal prompts", f"{distinct} different completions: each is an item of its own"],
            [
                "a batch of 1 keeps it from running out",
                f"{BATCH} were asked for, as many ran as fit; all {COMPLETIONS} are there",
            ],
            [
                "each layer has a pass of its own",
                f"{passes} texts passed; one pass gives all eight layers: {one_pass}",
            ],
            [
                "the store",
                f"{size(store_bytes)} for {9 * COMPLETIONS} results and the eight layers once more",
            ],
        ],
    )
    conclude(
        {
            "a batch of 64 does not fit": failure != "ran",
            "eight layers generate once": generated == COMPLETIONS,
            "the second sweep generates nothing and passes nothing": again == (0, 0),
            "200 equal prompts have 200 results": all(
                len(row["texts"]) == COMPLETIONS for row in first
            ),
            "no peak is over the device": all(row["peak_bytes"] <= CAPACITY for row in first),
            "activations are those of their layer": same,
            "and those of a run without a limit, to 1e-6": alike,
        }
    )


if __name__ == "__main__":
    main()
