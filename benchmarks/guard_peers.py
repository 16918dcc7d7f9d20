"""Figure: 8 jobs under the guard beside five other tools, the first and the second call of each.

A job is a model with random weights and rows that do not fit together on a simulated device. Each
tool runs it twice as its users write it. Times are this process's processor seconds beside the
ideal: the largest parts that fit, run directly. All tools run in turn, in one process, after a call
that loads what they need. Needs accelerate, torch-max-mem, toma, vrambatch and tenacity; a missing
tool is left out.
"""

import argparse
import gc
import inspect
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from support.batch_tools import device_with, largest, weights_bytes
from support.figure import conclude, skip

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROUNDS = 2
SHARE = 0.4  # of the room that all rows need
WITHIN = 1.1
Run = Callable[[int, int], Any]


def jobs() -> dict[str, tuple[Any, int, Run]]:
    """Return each job's model, its rows, and its call on some of the rows."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "pad_token_id": 0,
    }
    ids = torch.randint(3, 1000, (40, 48))
    mask = torch.ones_like(ids)
    pixels = torch.rand(24, 3, 64, 64)
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()
    qwen = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=16, num_key_value_heads=2)).eval()
    judge = hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes)).eval()
    bert = hf.BertModel(hf.BertConfig(**sizes)).eval()
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=1000,
            decoder_start_token_id=0,
        )
    ).eval()  # fmt: skip
    vision = {**sizes, "image_size": 64, "patch_size": 8}
    del vision["vocab_size"], vision["pad_token_id"]
    vit = hf.ViTForImageClassification(hf.ViTConfig(**vision)).eval()
    tagger = hf.BertForTokenClassification(hf.BertConfig(**sizes)).eval()
    greedy = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}

    def write(model: Any) -> Run:
        return lambda a, b: model.generate(ids[a:b], attention_mask=mask[a:b], **greedy)

    def read(model: Any, name: str, **options: Any) -> Run:
        return lambda a, b: model(ids[a:b], attention_mask=mask[a:b], **options)[name]

    return {
        "llama generate": (llama, 24, write(llama)),
        "qwen3 generate": (qwen, 24, write(qwen)),
        "t5 generate": (t5, 24, write(t5)),
        "llama logits": (llama, 40, read(llama, "logits", use_cache=False, logits_to_keep=1)),
        "llama classes": (judge, 40, read(judge, "logits", use_cache=False)),
        "bert pooled": (bert, 40, read(bert, "pooler_output")),
        "bert token classes": (tagger, 40, read(tagger, "logits")),
        "vit classes": (vit, 24, lambda a, b: vit(pixels[a:b]).logits),
    }


# Each tool as its users write it: a function of the job's call and rows that returns a function to
# call. The lines in it are those that a user adds.


def oomguard_guard(run: Run, rows: int) -> Callable[[], Any]:
    """The guard around the call."""
    import oomguard

    @oomguard.guard()
    def job() -> Any:
        return run(0, rows)

    return job


def accelerate(run: Run, rows: int) -> Callable[[], Any]:
    """accelerate's ``find_executable_batch_size``; each failure begins anew."""
    import torch
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=rows)
    def job(batch_size: int) -> Any:
        parts = []
        for start in range(0, rows, batch_size):
            parts.append(run(start, min(rows, start + batch_size)))
        return torch.cat(parts)

    return job


def torch_max_mem(run: Run, rows: int) -> Callable[[], Any]:
    """torch-max-mem's ``MemoryUtilizationMaximizer``; it remembers the size."""
    import torch
    from torch_max_mem import MemoryUtilizationMaximizer

    @MemoryUtilizationMaximizer(parameter_name="batch_size", q=1, safe_devices={"cpu", "cuda"})
    def job(batch_size: int) -> Any:
        parts = []
        for start in range(0, rows, batch_size):
            parts.append(run(start, min(rows, start + batch_size)))
        return torch.cat(parts)

    return lambda: job(batch_size=rows)


def toma(run: Run, rows: int) -> Callable[[], Any]:
    """toma's ``range``; it remembers the size."""
    import torch
    from toma import toma

    @toma.range(initial_step=rows)
    def step(start: int, end: int, parts: list[Any]) -> None:
        parts.append(run(start, end))

    def job() -> Any:
        parts: list[Any] = []
        step(0, rows, parts)
        return torch.cat(parts)

    return job


def vrambatch(run: Run, rows: int) -> Callable[[], Any]:
    """vrambatch's ``run_in_passes``; it halves a pass that fails."""
    import torch
    from vrambatch import run_in_passes

    def step(items: list[int]) -> list[Any]:
        return list(run(items[0], items[-1] + 1))

    # Release 0.1 runs each row alone. With max_units_per_pass=rows it gives up: it tries again inside
    # its handler, which keeps the failed pass's tensors.
    return lambda: torch.stack(run_in_passes(range(rows), step))


def tenacity(run: Run, rows: int) -> Callable[[], Any]:
    """A loop by hand with tenacity, which halves the size at each failure."""
    import torch
    from tenacity import retry, retry_if_exception_type, stop_after_attempt

    size = [rows]

    def halve(state: Any) -> None:
        size[0] = max(1, size[0] // 2)
        torch.cuda.empty_cache()

    @retry(
        retry=retry_if_exception_type(torch.OutOfMemoryError),
        stop=stop_after_attempt(8),
        after=halve,
    )
    def job() -> Any:
        parts = []
        for start in range(0, rows, size[0]):
            parts.append(run(start, min(rows, start + size[0])))
        return torch.cat(parts)

    return job


TOOLS = (oomguard_guard, accelerate, torch_max_mem, toma, vrambatch, tenacity)


def lines_of(tool: Callable[..., Any]) -> int:
    """Return how many lines a tool's user writes, without the call that is there anyway."""
    lines = inspect.getsource(tool).splitlines()[2:]
    return sum(bool(line.strip()) for line in lines) - 2


def limit_of(model: Any, rows: int, run: Run) -> tuple[int, int]:
    """Return the device's bytes, and the most rows that fit on it."""
    import torch

    with device_with(model, 1 << 40) as device:
        run(0, rows)
        weights = weights_bytes(model)
        capacity = int(weights + (device.peak_bytes - weights) * SHARE)

    def fits(size: int) -> bool:
        with device_with(model, capacity):
            try:
                run(0, size)
            except torch.OutOfMemoryError:
                return False
        return True

    return capacity, largest(fits, rows)


def ideal_s(run: Run, rows: int, most: int) -> float:
    """Return the seconds of the job in the largest parts that fit."""
    began_s = time.process_time()
    for start in range(0, rows, most):
        run(start, min(rows, start + most))
    return time.process_time() - began_s


def measured(
    tool: Callable[..., Any], run: Run, rows: int, expected: Any
) -> tuple[float, float, float]:
    """Return the seconds of a tool's two calls, and the mean rows of the parts that ran in both."""
    import torch

    sizes: list[int] = []

    def counted(start: int, stop: int) -> Any:
        if tool is oomguard_guard:
            return run(start, stop)
        result = run(start, stop)
        sizes.append(stop - start)
        return result

    job = tool(counted, rows)
    times = []
    for _ in range(2):
        gc.collect()
        began_s = time.process_time()
        result = job()
        times.append(time.process_time() - began_s)
        if not torch.allclose(result, expected, atol=1e-4):
            raise SystemExit(f"{tool.__name__} gave another result")
    return times[0], times[1], statistics.fmean(sizes or [0.0])


def main() -> None:
    """Run all jobs under all tools, print a line for each, and conclude."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="measured rounds, after one that is not"
    )
    asked = parser.parse_args()
    try:
        import torch
    except ImportError:
        skip("torch and transformers are not installed")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("oomguard").addHandler(logging.NullHandler())
    from oomguard.guarding import micro_batch

    ran_rows: list[int] = []
    run_rows = micro_batch.run_rows

    def noted(wrapped: Any, call: Any, start: int, stop: int) -> Any:
        result, error = run_rows(wrapped, call, start, stop)
        if error is None:
            ran_rows.append(stop - start)
        return result, error

    micro_batch.run_rows = noted
    ratios: dict[str, list[tuple[float, float]]] = {}
    shares: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, (model, rows, run) in jobs().items():
            expected = run(0, rows)
            capacity, most = limit_of(model, rows, run)
            rounds: dict[str, list[tuple[float, float, float]]] = {}
            ideals = []
            for _ in range(asked.rounds + 1):
                for tool in TOOLS:
                    ran_rows.clear()
                    with device_with(model, capacity):
                        try:
                            found = measured(tool, run, rows, expected)
                        except ImportError:
                            continue
                    if tool is oomguard_guard:
                        found = (*found[:2], statistics.fmean(ran_rows))
                    rounds.setdefault(tool.__name__, []).append(found)
                with device_with(model, capacity):
                    ideals.append(ideal_s(run, rows, most))
            ideal = statistics.median(ideals[1:])
            for tool_name, seen in rounds.items():
                first, second, mean = (
                    statistics.median(one[at] for one in seen[1:]) for at in range(3)
                )
                ratios.setdefault(tool_name, []).append((first / ideal, second / ideal))
                shares.setdefault(tool_name, []).append(mean / most)
                print(
                    f"{name:18} {tool_name:15} {first / ideal:.2f} {second / ideal:.2f} of the "
                    f"ideal {ideal:.2f} s, parts of {mean:.1f} rows, {most} fit",
                    flush=True,
                )
    report(ratios, shares)


def report(ratios: dict[str, list[tuple[float, float]]], shares: dict[str, list[float]]) -> None:
    """Print the medians of each tool, and conclude."""
    medians = {}
    for tool in TOOLS:
        name = tool.__name__
        if name not in ratios:
            print(f"{name}: not installed")
            continue
        first = statistics.median(one for one, _ in ratios[name])
        second = statistics.median(one for _, one in ratios[name])
        share = statistics.fmean(shares[name])
        medians[name] = first, second, share, lines_of(tool)
        print(
            f"{name:15} first call {first:.2f}, second call {second:.2f}, mean part {share:.0%} of "
            f"the largest, {lines_of(tool)} lines"
        )
    own = medians["oomguard_guard"]
    others = [figures for name, figures in medians.items() if name != "oomguard_guard"]
    best = [min(figures[at] for figures in others) for at in (0, 1)]
    met = own[0] <= WITHIN * best[0] and own[1] <= WITHIN * best[1]
    met = met and own[2] >= max(figures[2] for figures in others)
    met = met and own[3] <= min(figures[3] for figures in others)
    conclude(
        f"guarded jobs beside the ideal: {own[0]:.2f} and {own[1]:.2f}; best of {len(others)} other "
        f"tools {best[0]:.2f} and {best[1]:.2f} (goal: within 10 %, the largest parts, the fewest "
        "lines)",
        met=met,
    )


if __name__ == "__main__":
    main()
