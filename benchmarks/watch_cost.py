"""Figure: what `oomguard.watch()` costs a healthy job, and whether its peaks are the device's own; 5 minutes.

A job is some calls of a small Llama's `generate`, under `limit_memory` and without it. Each is run in pairs, watched and not, in turn,
who is first alternates. The figure is the mean logarithm of the ratios of seconds, the middle 80 % of the pairs, with a 95 % interval by
bootstrap. Beside it stand the same of CPU seconds, which a busy machine disturbs less, and what of the cost comes once a watch, not with
each call: entering and leaving it. On a GPU nothing is measured here.
"""

import argparse
import contextlib
import math
import os
import statistics
import time
from typing import NamedTuple

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


class Ran(NamedTuple):
    """One job: its seconds, those of the processor and those of entering and leaving the watch; the peaks in bytes, 0 without."""

    seconds: float
    cpu_seconds: float
    once_seconds: float
    own_peak: int
    seen_peak: int


def job(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], *, watched: bool, limited: bool) -> Ran:
    """Run the calls, watched or not, on a simulated device or without one."""
    device = limit_memory("8 GiB") if limited else contextlib.nullcontext()
    with device:
        began, cpu_began = time.perf_counter(), time.process_time()
        with oomguard.watch() if watched else contextlib.nullcontext() as seen:
            entered = time.perf_counter()
            for _ in range(CALLS):
                model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
            left = time.perf_counter()
        ended, cpu_ended = time.perf_counter(), time.process_time()
    own = device.peak_bytes if isinstance(device, SimulatedDevice) else 0
    peaks = [] if seen is None else [use.peak_bytes for use in seen.uses if use.device == "simulated"]
    return Ran(ended - began, cpu_ended - cpu_began, entered - began + ended - left, own, *(peaks or [0]))


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
        logs, cpu_logs, once = [], [], []
        for pair in range(asked.pairs + 2):
            order = (True, False) if pair % 2 else (False, True)
            ran = {side: job(model, batch, watched=side and not asked.control, limited=limited) for side in order}
            if pair >= 2:  # the first ones are warm-up
                logs.append(math.log(ran[True].seconds / ran[False].seconds))
                cpu_logs.append(math.log(ran[True].cpu_seconds / ran[False].cpu_seconds))
                once.append(ran[True].once_seconds)
            if limited:
                peaks |= {ran[False].own_peak, ran[True].own_peak, ran[True].seen_peak or ran[True].own_peak}
        ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)
        cpu_low, cpu_high = interval(cpu_logs)
        met = met and ratio <= GOAL
        name = "under limit_memory" if limited else "without it"
        figures.append(f"{name} {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}")
        print(
            f"{name}: CPU seconds {math.exp(trimmed(cpu_logs)):.4f}, 95 % interval {cpu_low:.4f} to {cpu_high:.4f}; "
            f"once a watch {1e3 * statistics.median(once):.2f} ms (median)"
        )
    print(f"peaks of {asked.pairs} pairs, the device's own and the watch's: {sorted(peaks)} bytes")
    conclude(
        f"time of a watched job beside itself without, {asked.pairs} pairs of {CALLS} calls: {'; '.join(figures)} "
        f"(goal <= {GOAL}); peaks {'equal' if len(peaks) == 1 else 'DIFFER'}",
        met=met and len(peaks) == 1,
    )


if __name__ == "__main__":
    main()
