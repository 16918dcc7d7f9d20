"""Figure: what `oomguard.watch()` costs a healthy job, and whether its peaks are the device's own; 5 minutes.

A job is some calls of a small Llama's `generate`, under `limit_memory` and without it. Each is run in pairs, watched and not, in turn,
who is first alternates. The figure is the mean logarithm of the ratios, the middle 80 % of the pairs, with a 95 % interval by
bootstrap. On a GPU nothing is measured here.
"""

import argparse
import contextlib
import math
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oomguard
from oomguard.testing import SimulatedDevice, limit_memory
from support.figure import conclude
from support.paired import interval, trimmed

GOAL, CALLS, TOKENS = 1.01, 8, 16
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


def job(
    model: LlamaForCausalLM, batch: dict[str, torch.Tensor], *, watched: bool, limited: bool
) -> tuple[float, int, int]:
    """Run the calls; return the seconds, the device's own peak, and that of the watch (0 where there is none)."""
    device = limit_memory("8 GiB") if limited else contextlib.nullcontext()
    with device:
        began = time.perf_counter()
        with oomguard.watch() if watched else contextlib.nullcontext() as seen:
            for _ in range(CALLS):
                model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
        took = time.perf_counter() - began
    own = device.peak_bytes if isinstance(device, SimulatedDevice) else 0
    peaks = [] if seen is None else [use.peak_bytes for use in seen.uses if use.device == "simulated"]
    return took, own, *(peaks or [0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=80, help="pairs of jobs for each of both (default 80)")
    parser.add_argument("--control", action="store_true", help="watch neither of a pair: what the method sees")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, pad_token_id=0, eos_token_id=None, **SIZES)).eval()
    batch = {"input_ids": torch.randint(3, 1024, (4, 64))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    figures, met, peaks = [], True, set()
    for limited in (True, False):
        logs = []
        for pair in range(asked.pairs + 2):
            order = (True, False) if pair % 2 else (False, True)
            ran = {side: job(model, batch, watched=side and not asked.control, limited=limited) for side in order}
            if pair >= 2:  # the first ones are warm-up
                logs.append(math.log(ran[True][0] / ran[False][0]))
            if limited:
                peaks |= {ran[False][1], ran[True][1], ran[True][2] or ran[True][1]}
        ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)
        met = met and ratio <= GOAL
        name = "under limit_memory" if limited else "without it"
        figures.append(f"{name} {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    print(f"peaks of {asked.pairs} pairs, the device's own and the watch's: {sorted(peaks)} bytes")
    conclude(
        f"time of a watched job beside itself without, {asked.pairs} pairs of {CALLS} calls: {'; '.join(figures)} "
        f"(goal <= {GOAL}); peaks {'equal' if len(peaks) == 1 else 'DIFFER'}",
        met=met and len(peaks) == 1,
    )


if __name__ == "__main__":
    main()
