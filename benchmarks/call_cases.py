"""Figure: the guard on 1,000 generated calls of models, 24 kinds of call over 78 families; an hour or two.

Each case is a call as users write it (support/call_patterns.py), a model with random weights, rows, lengths, padding, and a device on
which the rows do not all fit at once. The largest feasible batch is found by trying, with the results of the other rows on the device,
as a loop over batches has them there. Compared are the results (of the whole call without a limit, field by field, and of the guard), and
the rows that the model's first layer saw: those of failed attempts, and each other row once.
"""

import collections
import contextlib
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

from support.batch_tools import device_with, largest, tried, weights_bytes
from support.call_models import make_model
from support.call_patterns import PATTERNS, make_inputs
from support.figure import conclude
from support.generated_cases import told, used_cases

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
NAMES = [name for name, pattern in PATTERNS.items() for _ in range(pattern.share)]
# Sums of other numbers of rows are made in another order: the last bits of float32 differ, as between two batches without a guard.
ATOL, RTOL = 1e-4, 1e-3


def make_case(number: int, seed: int) -> dict[str, Any]:
    """The numbers of one case; the same for the same seed."""
    draw = random.Random(1000 * seed + number)
    name = NAMES[number % len(NAMES)]
    pattern = PATTERNS[name]
    generates = "new" if pattern.call.__qualname__.startswith("generated") else ""
    return {
        "number": number,
        "pattern": name,
        "family": draw.choice(pattern.families),
        "head": pattern.head,
        "hidden": draw.choice((64, 96, 128)),
        "layers": draw.choice((2, 4)),
        "vocab": draw.choice((500, 2000, 8000)),
        "rows": draw.randint(8, 64),
        "prompt": draw.randint(16, 96) if generates and draw.random() < 0.4 else draw.randint(32, 256),
        "new": draw.randint(2, 24),
        "padding": draw.choice(("", "left" if generates else "right")),
        "share": draw.uniform(0.12, 0.95),
    }


class Trial:
    """One case on its device: the call on some rows, and the largest number that fits."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        self.case, self.model, self.rows = case, make_model(case), case["rows"]
        self.pattern = PATTERNS[case["pattern"]]
        self.inputs = make_inputs(self.pattern.inputs, case)
        with self.device(2**40) as device:
            torch.manual_seed(0)
            whole = self.call()
            weights = weights_bytes(self.model)
            self.result_bytes = bytes_of(whole)
            self.capacity = int(
                weights + self.result_bytes + (device.peak_bytes - weights - self.result_bytes) * case["share"]
            )
        torch.manual_seed(0)
        self.whole = self.call()

    def device(self, capacity: int) -> contextlib.AbstractContextManager[Any]:
        """A device with the weights on it."""
        return device_with(self.model, capacity)

    def call(self, start: int = 0, stop: int | None = None) -> Any:
        """The call on rows ``start`` to ``stop``."""
        import torch

        inputs = {name: value[start:stop] for name, value in self.inputs.items()}
        with torch.inference_mode():
            return self.pattern.call(self.model, inputs, self.case)

    def fits(self, rows: int) -> bool:
        """Whether that many rows run at once, beside the results of the others."""
        import torch

        with self.device(self.capacity):
            try:
                others = torch.empty(self.result_bytes * (self.rows - rows) // self.rows, dtype=torch.uint8)
                self.call(0, rows)
                del others
            except torch.OutOfMemoryError:
                return False
            return True


def bytes_of(result: Any) -> int:
    """Return the bytes of a result's tensors."""
    return sum(tensor.nbytes for tensor in tensors(result))


def tensors(result: Any) -> Iterator[Any]:
    """Every tensor of a result, in its order."""
    if hasattr(result, "untyped_storage"):
        yield result
    elif hasattr(result, "layers"):  # a cache
        for layer in result.layers:
            yield from (
                held for held in (getattr(layer, "keys", None), getattr(layer, "values", None)) if held is not None
            )
    elif isinstance(result, dict | list | tuple):
        for entry in result.values() if isinstance(result, dict) else result:
            yield from tensors(entry)


def difference(whole: Any, parts: Any) -> str:
    """Return how the result under the guard differs from that of the whole call; "" where it does not."""
    if type(whole) is not type(parts) and not (isinstance(parts, type(whole)) and waits_on_host(parts)):
        return f"a {type(parts).__name__} in place of a {type(whole).__name__}"
    if isinstance(whole, dict) and list(whole) != list(parts):
        return f"fields {list(parts)} in place of {list(whole)}"
    mine, theirs = list(tensors(whole)), list(tensors(parts))
    if len(mine) != len(theirs):
        return f"{len(theirs)} tensors in place of {len(mine)}"
    return next((found for pair in zip(mine, theirs, strict=True) if (found := _differs(*pair))), "")


def waits_on_host(result: Any) -> bool:
    """Return whether a result is, or holds, a tensor that has no room on the device and waits on the host."""
    import torch

    return any(type(tensor) is not torch.Tensor for tensor in tensors(result))


def _differs(mine: Any, theirs: Any) -> str:
    import torch

    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{tuple(theirs.shape)} {theirs.dtype} in place of {tuple(mine.shape)} {mine.dtype}"
    if not mine.is_floating_point():
        return (
            ""
            if torch.equal(mine, theirs)
            else f"{int((mine != theirs).flatten(1).any(1).sum())} of {len(mine)} rows differ"
        )
    if torch.allclose(mine, theirs, RTOL, ATOL, equal_nan=True):
        return ""
    return f"values differ by {float((mine - theirs).abs().nan_to_num().max()):.2g}"


@contextlib.contextmanager
def rows_seen(trial: Trial) -> Iterator[list[int]]:
    """Count the rows of the inputs that the model's first layer sees, call by call; those of a trace do not count."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    seen: list[int] = []
    length = next(iter(trial.inputs.values())).shape[1:]
    kinds = {"text": (torch.nn.Embedding,), "images": (torch.nn.Conv2d,), "sound": (torch.nn.Conv1d,)}[
        trial.pattern.inputs
    ]
    own = {kind: kind.forward for kind in kinds}

    def counted(kind: Any) -> Any:
        def forward(module: Any, given: Any, *more: Any, **others: Any) -> Any:
            shape = given.shape[1:] if trial.pattern.inputs != "sound" else given.shape[2:]
            # Tables of positions, or of distances between them, are looked up too: not with rows.
            is_first = kind is not torch.nn.Embedding or module.weight is trial.model.get_input_embeddings().weight
            if is_first and shape == length and not isinstance(given, FakeTensor):
                seen.append(len(given))
            return own[kind](module, given, *more, **others)

        return forward

    for kind in kinds:
        kind.forward = counted(kind)
    try:
        yield seen
    finally:
        for kind in kinds:
            kind.forward = own[kind]


def compared(trial: Trial) -> dict[str, Any]:
    """Run the guard once more and compare: what differs, and how many rows were computed beside those of failed attempts."""
    import torch

    import oomguard

    with rows_seen(trial) as bare:
        torch.manual_seed(0)
        trial.call()
    with rows_seen(trial) as seen, trial.device(trial.capacity), oomguard.guard() as g:
        torch.manual_seed(0)
        parts = trial.call()
    rows = [attempt.settings.get("batch_size") for attempt in g.attempts]
    a_row = sum(bare) / trial.rows  # several layers may see the inputs, each row several times
    differs, on_host = difference(trial.whole, parts), waits_on_host(parts)
    return {"differs": differs, "on_host": on_host, "sizes": rows, "seen": sum(seen) / a_row if a_row else None}


def run_case(numbers: tuple[int, int]) -> dict[str, Any]:
    """One case under every tool: (failed attempts, rows) each, None where it gave up."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case = make_case(*numbers)
    trial = Trial(case)
    feasible = largest(trial.fits, trial.rows)
    found = {**case, "feasible": feasible, "capacity": trial.capacity, **tried(trial, feasible)}
    if found.get("oomguard"):
        found |= compared(trial)
    return found


def is_odd(found: dict[str, Any]) -> bool:
    """Tell whether a case that ran is worth a line for its results."""
    return bool(found["oomguard"] and (found["differs"] or twice(found)))


def twice(found: dict[str, Any]) -> bool:
    """Tell whether rows were computed that were neither new nor of an attempt that failed."""
    failed = found["sizes"][:-1]
    return (
        found["seen"] is not None
        and found["seen"] > found["rows"] + sum(size or found["rows"] for size in failed) + 0.5
    )


def load() -> None:
    """Import the models of all families: an import takes longer than a case."""
    import torch
    import transformers as hf

    torch.set_num_threads(1)
    for pattern in PATTERNS.values():
        for family in pattern.families:
            getattr(hf, pattern.head)._model_mapping[type(hf.AutoConfig.for_model(family))]


def main() -> None:
    used, left_out = used_cases(__doc__, 1200, run_case, is_odd, load=load, per_worker=200)
    kinds, families = ({r[key] for r in used} for key in ("pattern", "family"))
    print(f"{len(used)} cases, {len(kinds)} kinds of call, {len(families)} families; {left_out} left out")
    ran = [r for r in used if r["oomguard"]]
    differ = collections.Counter(r["pattern"] for r in ran if r["differs"])
    again = sum(twice(r) for r in ran)
    print(f"results of which a tensor waits on the host: {sum(r['on_host'] for r in ran)} of {len(ran)}")
    print(f"results that differ: {sum(differ.values())} {dict(differ)}; rows computed twice: in {again} cases")
    line, met = told(used)
    conclude(
        f"{line}; {sum(differ.values())} results differ, rows were computed twice in {again} cases (goal: 0)",
        met=met and not differ and not again,
    )


if __name__ == "__main__":
    main()
