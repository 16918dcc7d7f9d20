"""Figures: what a guarded call that succeeds costs beside ``tenacity.retry``, and beside a
``generate`` of a small model.

The function returns its argument, so that everything above its own call is the decorator's; all run
in turn, medians are compared. What a guard adds to a ``generate`` is far below what two runs of one
differ by, so that it is measured around a call that does nothing, with the arguments of the real
one, and set beside the real one's processor time. Skipped without torch and transformers.
"""

import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import tenacity

import oomguard
from support.figure import conclude

ROUNDS = 31
CALLS = 2000
GOAL = 1 / 10
NEW_TOKENS = 32
GENERATE_GOAL = 0.001


def plain(x: int) -> int:
    return x


guarded = oomguard.guard(plain)
retried = tenacity.retry(plain)


def microseconds(function: Callable[[int], int]) -> float:
    """Return the mean of one call."""
    began = time.perf_counter()
    for number in range(CALLS):
        function(number)
    return 1e6 * (time.perf_counter() - began) / CALLS


def microseconds_around(model: Any, ids: Any, call: dict[str, Any]) -> float:
    """Return the processor time of one call; what else the machine does counts for nothing."""
    times = timeit.repeat(
        lambda: model.generate(ids, **call), timer=time.thread_time, number=CALLS, repeat=5
    )
    return 1e6 * min(times) / CALLS


def around_generate() -> tuple[float, str]:
    """Return what a guard adds to a ``generate`` that succeeds as a share of it, and a line that
    says so.
    """
    try:
        import torch
        from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
    except ImportError:
        return 0.0, "generate: skipped, torch and transformers are not installed"
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    ).eval()
    ids = torch.randint(3, 512, (4, 64))
    call = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
    }
    took_s = []
    for _ in range(4):
        began = time.thread_time()
        model.generate(ids, **call)
        took_s.append(time.thread_time() - began)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = "CPU"
    GenerationMixin.generate = lambda self, *args, **kwargs: (
        None
    )  # what is timed is all that is around it
    bare = microseconds_around(model, ids, call)
    with oomguard.guard():
        guarded = microseconds_around(model, ids, call)
    share = 1e-6 * (guarded - bare) / min(took_s)
    line = (
        f"a generate of {NEW_TOKENS} tokens of a model of 2 layers on {device}: "
        f"{1e3 * min(took_s):.0f} ms, the guard "
        f"adds {guarded - bare:.1f} us: {100 * share:.3f} % (goal <= {100 * GENERATE_GOAL:.1f} %)"
    )
    return share, f"{line}: {'met' if share <= GENERATE_GOAL else 'NOT MET'}"


def main() -> None:
    generate_share, generated = (
        around_generate()
    )  # before anything is guarded: what does nothing has to be what is watched
    functions = (plain, guarded, retried)
    for function in functions:
        microseconds(function)  # warm
    rounds = [[microseconds(function) for function in functions] for _ in range(ROUNDS)]
    bare, own, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratio = (own - bare) / (theirs - bare)
    print(generated)
    conclude(
        f"a call {bare:.2f} us, under oomguard.guard {own:.2f} us, under tenacity.retry "
        f"{theirs:.2f} us: "
        f"what is added is 1/{1 / ratio:.1f} of tenacity's (goal <= 1/{1 / GOAL:.0f})",
        met=ratio <= GOAL and generate_share <= GENERATE_GOAL,
    )


if __name__ == "__main__":
    main()
