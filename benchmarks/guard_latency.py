"""Figures: how long after a failure the next attempt starts, and a guarded call beside the ideal
one.

A Llama of 4, 24 and 64 layers with random weights runs on a simulated device where its batch does
not fit. The log line and the next attempt are timed from the moment the failed call raised, in this
thread's processor time. The ideal is the largest batch that fits, run directly, part by part; both
run in turn, and the medians are compared. Skipped without torch and transformers.
"""

import contextlib
import logging
import statistics
import sys
import time
from typing import Any

import oomguard
from support.figure import conclude, skip

LAYERS = (4, 24, 64)
ROWS = 24
PROMPT = 64
NEW = 8
ROUNDS = 3
NEXT_GOAL_S = 0.3
LINE_GOAL_S = 0.05
IDEAL_GOAL_RATIO = 1.4
SECOND_GOAL_RATIO = 1.1
SHARE = 0.5  # of the room that the whole batch needs


class Clock(logging.Handler):
    """Notes when the first line after a failure was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.first_s: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the time of the first record."""
        if self.first_s is None:
            self.first_s = time.thread_time()


def calls_of(layers: int) -> dict[str, tuple[Any, Any]]:
    """Return a model with random weights for each of the two calls, and its call by rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=layers, pad_token_id=0)
    answers = LlamaForCausalLM(config).eval()
    judges = LlamaForSequenceClassification(config).eval()
    ids = torch.randint(3, 512, (ROWS, PROMPT))
    mask = torch.ones_like(ids)
    greedy = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return {
        "generate": (
            answers,
            lambda a, b: answers.generate(ids[a:b], attention_mask=mask[a:b], **greedy),
        ),
        "forward": (
            judges,
            lambda a, b: judges(ids[a:b], attention_mask=mask[a:b], use_cache=False),
        ),
    }


def room_of(model: Any, run: Any) -> tuple[int, int]:
    """Return the device on which the call does not fit, and the most rows that fit there."""
    from oomguard.probe import torch_memory
    from oomguard.testing import limit_memory

    peaks = {}
    with limit_memory(1 << 40):
        base = torch_memory.live_bytes(model) or 0
        for rows in (1, ROWS):
            with torch_memory.MemoryPeak() as peak:
                run(0, rows)
            peaks[rows] = (peak.bytes or 0) - base
    room = int(peaks[ROWS] * SHARE)
    row = (peaks[ROWS] - peaks[1]) / (ROWS - 1)
    return base + room, max(1, int((room - peaks[1]) / row) + 1)


def timed(model: Any, run: Any, capacity: int) -> dict[str, float]:
    """Run a call that fails under a guard, then a second one; return its seconds."""
    from oomguard.guarding import micro_batch
    from oomguard.probe import torch_memory
    from oomguard.testing import limit_memory

    clock = Clock()
    began = []
    raised = []
    logger = logging.getLogger("oomguard")
    logger.addHandler(clock)
    explain = micro_batch.MicroBatchRun._explain
    run_rows = micro_batch.run_rows

    def explaining(self: Any, error: BaseException) -> Any:
        raised.append(time.thread_time())
        return explain(self, error)

    def running(*given: Any) -> Any:
        began.append(time.thread_time())
        return run_rows(*given)

    micro_batch.MicroBatchRun._explain = explaining
    micro_batch.run_rows = running
    try:
        with limit_memory(capacity), oomguard.guard() as guard:
            torch_memory.live_bytes(model)
            first = time.thread_time()
            run(0, ROWS)
            second = time.thread_time()
            failed = sum(not attempt.succeeded for attempt in guard.attempts)
            run(0, ROWS)
            end = time.thread_time()
            again = sum(not attempt.succeeded for attempt in guard.attempts) - failed
    finally:
        micro_batch.MicroBatchRun._explain = explain
        micro_batch.run_rows = run_rows
        logger.removeHandler(clock)
    return {
        "first": second - first,
        "second": end - second,
        "line": (clock.first_s or raised[0]) - raised[0],
        "next": began[0] - raised[0],
        "failed": failed,
        "failed again": again,
    }


def ideal_s(model: Any, run: Any, capacity: int, most: int) -> float:
    """Return the seconds of the call in the largest parts that fit."""
    from oomguard.probe import torch_memory
    from oomguard.testing import limit_memory

    with limit_memory(capacity):
        torch_memory.live_bytes(model)
        began = time.thread_time()
        for start in range(0, ROWS, most):
            run(start, min(ROWS, start + most))
        return time.thread_time() - began


def main() -> None:
    """Measure, print a line for each model and call, and conclude."""
    try:
        import torch
    except ImportError:
        skip("torch and transformers are not installed")
    torch.set_num_threads(1)
    logging.getLogger("oomguard").addHandler(logging.NullHandler())
    worst = {"line": 0.0, "next": 0.0}
    ratios = []
    second_ratios = []
    with contextlib.redirect_stdout(sys.stdout), torch.inference_mode():
        for layers in LAYERS:
            for name, (model, run) in calls_of(layers).items():
                run(0, 2)
                capacity, most = room_of(model, run)
                rounds = [
                    (timed(model, run, capacity), ideal_s(model, run, capacity, most))
                    for _ in range(ROUNDS)
                ]
                times = {
                    key: statistics.median(one[key] for one, _ in rounds) for key in rounds[0][0]
                }
                ideal = statistics.median(best for _, best in rounds)
                worst = {
                    key: max(value, *(one[key] for one, _ in rounds))
                    for key, value in worst.items()
                }
                ratios.append(times["first"] / ideal)
                second_ratios.append(times["second"] / ideal)
                print(
                    f"{name:8} {layers:2} layers: first line {1e3 * times['line']:.0f} ms, next "
                    "attempt "
                    f"{1e3 * times['next']:.0f} ms, first call {ratios[-1]:.2f} and second call "
                    f"{second_ratios[-1]:.2f} of the ideal {ideal:.2f} s; failed attempts "
                    f"{times['failed']:.0f}, then {times['failed again']:.0f}"
                )
    first = statistics.median(ratios)
    second = statistics.median(second_ratios)
    is_met = worst["next"] <= NEXT_GOAL_S and worst["line"] <= LINE_GOAL_S
    is_met = is_met and first <= IDEAL_GOAL_RATIO and second <= SECOND_GOAL_RATIO
    conclude(
        f"first line after at most {1e3 * worst['line']:.0f} ms (goal {1e3 * LINE_GOAL_S:.0f}), "
        "next attempt after at most "
        f"{1e3 * worst['next']:.0f} ms (goal {1e3 * NEXT_GOAL_S:.0f}), calls {first:.2f} and "
        f"{second:.2f} of the ideal "
        f"(goals {IDEAL_GOAL_RATIO} and {SECOND_GOAL_RATIO})",
        met=is_met,
    )


if __name__ == "__main__":
    main()
