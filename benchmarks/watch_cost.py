"""Figure: what `oomguard.watch()` costs a healthy job, and whether its peaks are the device's own; 5 minutes.

A job is some calls of a small Llama's `generate`, under `limit_memory` and without it. Each is run in pairs, watched and not, in turn,
who is first alternates. The figure is the mean logarithm of the ratios of seconds, the middle 80 % of the pairs, with a 95 % interval by
bootstrap. Beside it stand the same of CPU seconds, which a busy machine disturbs less, and what of the cost comes once a watch, not with
each call: entering and leaving it. With --device cuda the model is on a GPU, and the peaks are judged by torch's own.
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
from support.figure import conclude, skip
from support.paired import interval, trimmed

GOAL, CALLS, TOKENS = 1.01, 8, 16
SIMULATED, CUDA = "simulated", "cuda:0"
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


class Ran(NamedTuple):
    """One job: its seconds, those of the processor and those of entering and leaving the watch; the peaks in bytes, 0 without."""

    seconds: float
    cpu_seconds: float
    once_seconds: float
    own_peak: int
    seen_peak: int


def job(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], *, watched: bool, limited: bool) -> Ran:
    """Run the calls, watched or not, on a simulated device, without one, or on the GPU that the model is on."""
    device = limit_memory("8 GiB") if limited else contextlib.nullcontext()
    on_gpu = model.device.type == "cuda"
    name, own = CUDA if on_gpu else SIMULATED, 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    with device:
        began, cpu_began = time.perf_counter(), time.process_time()
        with oomguard.watch() if watched else contextlib.nullcontext() as seen:
            entered = time.perf_counter()
            for _ in range(CALLS):
                model.generate(**batch, max_new_tokens=TOKENS, do_sample=False)
                if on_gpu:  # a watch measures it anew with each call
                    own = max(own, torch.cuda.max_memory_allocated())
            if on_gpu:
                torch.cuda.synchronize()
            left = time.perf_counter()
        ended, cpu_ended = time.perf_counter(), time.process_time()
    own = device.peak_bytes if isinstance(device, SimulatedDevice) else own
    peaks = (
        [] if seen is None else [use.peak_bytes for use in seen.uses if (use.device, use.what) == (name, "allocated")]
    )
    return Ran(ended - began, cpu_ended - cpu_began, entered - began + ended - left, own, *(peaks or [0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=80, help="pairs of jobs for each of both (default 80)")
    parser.add_argument("--control", action="store_true", help="watch neither of a pair: what the method sees")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is (default cpu)")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        skip("no CUDA device")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, pad_token_id=0, eos_token_id=None, **SIZES)).eval()
    model = model.to(asked.device)
    batch = {"input_ids": torch.randint(3, 1024, (4, 64)).to(asked.device)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    figures, met, peaks, differ = [], True, set(), 0
    for limited in (True, False) if asked.device == "cpu" else (False,):
        logs, cpu_logs, once = [], [], []
        for pair in range(asked.pairs + 2):
            order = (True, False) if pair % 2 else (False, True)
            ran = {side: job(model, batch, watched=side and not asked.control, limited=limited) for side in order}
            if pair >= 2:  # the first ones are warm-up
                logs.append(math.log(ran[True].seconds / ran[False].seconds))
                cpu_logs.append(math.log(ran[True].cpu_seconds / ran[False].cpu_seconds))
                once.append(ran[True].once_seconds)
            peaks |= {own for side in order if (own := ran[side].own_peak)}
            differ += ran[True].seen_peak not in (0, ran[True].own_peak)  # 0: of a control
            # What a simulated device counts is the same each time; torch's blocks are as large as those that it finds.
            differ += limited and ran[True].own_peak != ran[False].own_peak
        ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)
        cpu_low, cpu_high = interval(cpu_logs)
        met = met and ratio <= GOAL
        name = (
            "under limit_memory" if limited else "without it" if asked.device == "cpu" else torch.cuda.get_device_name()
        )
        figures.append(f"{name} {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}")
        print(
            f"{name}: CPU seconds {math.exp(trimmed(cpu_logs)):.4f}, 95 % interval {cpu_low:.4f} to {cpu_high:.4f}; "
            f"once a watch {1e3 * statistics.median(once):.2f} ms (median)"
        )
    print(f"peaks of {asked.pairs} pairs, the device's own: {sorted(peaks)} bytes")
    conclude(
        f"time of a watched job beside itself without, {asked.pairs} pairs of {CALLS} calls: {'; '.join(figures)} "
        f"(goal <= {GOAL}); peaks {'equal' if not differ else f'DIFFER in {differ}'}",
        met=met and not differ,
    )


if __name__ == "__main__":
    main()
