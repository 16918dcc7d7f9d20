"""Figure: the guard on 1,000 generated calls of models, 24 kinds of call over 78 families; an hour
or two.

Each case is a call as users write it (support/call_patterns.py), a model with random weights, rows,
lengths, padding, and a device on which the rows do not all fit at once. The largest feasible batch
is found by trying, with the results of the other rows on the device, as a loop over batches has
them there. Compared are the results (of the whole call without a limit, field by field, and of the
guard), and the rows that the model's first layer saw: those of failed attempts, and each other row
once.

With ``--device cuda`` the same cases run in larger sizes on a GPU with a limit. There a result that
differs from the whole call's is compared with a plain loop in the guard's own sizes too: where the
loop gives the same, the rows in a batch made the difference, not the guard. What is alive after a
guarded call, beside its result, is counted.
"""

import collections
import contextlib
import gc
import os
import random
import time
import warnings
from typing import Any

from support.bare_loop import loop_of
from support.batch_tools import TOOLS, largest, tried
from support.call_devices import DEVICES, runs
from support.call_models import make_model
from support.call_patterns import PATTERNS, make_inputs
from support.call_results import Kept, bytes_of, difference, storage_bytes
from support.figure import conclude
from support.generated_cases import told, used_cases
from support.seen_rows import parts_joined, rows_seen

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
NAMES = [name for name, pattern in PATTERNS.items() for _ in range(pattern.share)]


def make_case(number: int, seed: int) -> dict[str, Any]:
    """The numbers of one case; the same for the same seed."""
    draw = random.Random(1000 * seed + number)
    name = NAMES[number % len(NAMES)]
    pattern = PATTERNS[name]
    if pattern.call.__qualname__.startswith("generated"):
        generates = "new"
    else:
        generates = ""
    return {
        "number": number,
        "pattern": name,
        "family": draw.choice(pattern.families),
        "head": pattern.head,
        "hidden": draw.choice((64, 96, 128)),
        "layers": draw.choice((2, 4)),
        "vocab": draw.choice((500, 2000, 8000)),
        "rows": draw.randint(8, 64),
        "prompt": draw.randint(16, 96)
        if generates and draw.random() < 0.4
        else draw.randint(32, 256),
        "new": draw.randint(2, 24),
        "padding": draw.choice(("", "left" if generates else "right")),
        "share": draw.uniform(0.12, 0.95),
        "image": 64,  # pixels of a side
        "channels": 16,  # of the first layers of a model of sound
    }


class Trial:
    """One case on its device: the call on some rows, and the largest number that fits."""

    def __init__(self, case: dict[str, Any], device: str = "simulated") -> None:
        self.place = DEVICES[device]()
        self.case = self.place.enlarged(case)
        self.pattern = PATTERNS[case["pattern"]]
        self.model = make_model(self.case).to(self.place.kind)
        self.make_inputs()
        while self.rows > 1 and not self.place.has_room(self.model, self.seeded):
            self.case["rows"] //= 2
            self.make_inputs()
        live_bytes = self.place.live_bytes()
        whole, held, peak = self.place.measured(self.model, self.seeded)
        self.result_bytes = bytes_of(whole)
        # What a bare call keeps alive beside the tensors that are compared: the guard's may keep as
        # much.
        self.beside_bytes = self.beside(whole, live_bytes)
        del whole
        self.capacity = int(
            held + self.result_bytes + (peak - held - self.result_bytes) * self.case["share"]
        )
        with self.rows_seen() as seen:
            self.whole = Kept.of(self.seeded())
        self.seen_a_row = (
            sum(seen) / self.rows
        )  # several layers may see the inputs, each row several times

    def make_inputs(self) -> None:
        """Make the inputs of as many rows as the case has."""
        self.rows = self.case["rows"]
        made = make_inputs(self.pattern.inputs, self.case)
        self.inputs = {name: value.to(self.place.kind) for name, value in made.items()}

    def device(self, capacity: int) -> contextlib.AbstractContextManager[Any]:
        """A device with the weights on it."""
        return self.place.limit(self.model, capacity)

    def rows_seen(self) -> contextlib.AbstractContextManager[list[int]]:
        """Count the rows that the model's first layer sees."""
        return rows_seen(self.model, self.inputs, self.pattern.inputs)

    def call(self, start: int = 0, stop: int | None = None) -> Any:
        """The call on rows ``start`` to ``stop``."""
        import torch

        inputs = {name: value[start:stop] for name, value in self.inputs.items()}
        with torch.inference_mode():
            return self.pattern.call(self.model, inputs, self.case)

    def seeded(self) -> Any:
        """The call on all rows, which draws the same each time."""
        import torch

        torch.manual_seed(0)
        return self.call()

    def beside(self, result: Any, before_bytes: int | None) -> int | None:
        """Bytes that are alive beside a result and what was there before; None where they are not
        counted.
        """
        now_bytes = self.place.live_bytes()
        if now_bytes is None or before_bytes is None:
            return None
        return now_bytes - before_bytes - storage_bytes(result)

    def fits(self, rows: int) -> bool:
        """Whether that many rows run at once, beside the results of the others."""
        import torch

        def beside_others() -> None:
            held = self.result_bytes * (self.rows - rows) // self.rows
            others = torch.empty(held, dtype=torch.uint8, device=self.place.kind)
            self.call(0, rows)
            del others

        with self.device(self.capacity):
            return runs(beside_others)


def compared(trial: Trial) -> dict[str, Any]:
    """Run the call under a guard and compare: its attempts, what differs, and how many rows were
    computed beside those of failed ones.
    """
    import oomguard

    with (
        trial.device(trial.capacity),
        trial.rows_seen() as seen,
        parts_joined() as joined,
        oomguard.guard() as g,
    ):
        before_bytes = trial.place.live_bytes()
        began_s = time.monotonic()
        result = trial.seeded()
        took_s = time.monotonic() - began_s
        beside_bytes = trial.beside(result, before_bytes)
    parts = Kept.of(result)
    rows = trial.seen_a_row
    # The allocator may find room where it had none when the largest number was looked for: then
    # nothing failed.
    if g.attempts:
        settings = dict(g.attempts[-1].settings)
    else:
        settings = {}
    found = {
        "differs": difference(trial.whole, parts),
        "sizes": [attempt.settings.get("batch_size") for attempt in g.attempts] or [trial.rows],
        "seen": sum(seen) / rows if rows else None,
        "guard_s": round(took_s, 2),
    }
    if varied := {name: str(value) for name, value in settings.items() if name != "batch_size"}:
        found["varied"] = varied
    if beside_bytes is not None:
        found["alive_bytes"] = beside_bytes - trial.beside_bytes
        gc.collect()
        found["alive_later_bytes"] = trial.beside(result, before_bytes) - trial.beside_bytes
    del result
    if found["differs"] and trial.place.rounds_by_rows:
        loop = loop_of(trial.call, joined, trial.whole)
        found["joined"], found["differs_from_loop"] = (
            list(joined),
            "no loop" if loop is None else difference(loop, parts),
        )
    return found


def run_case(numbers: tuple[int, int], device: str = "simulated") -> dict[str, Any]:
    """One case under every tool: (failed attempts, rows) each, None where it gave up."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began_s = time.monotonic()
    trial = Trial(make_case(*numbers), device)
    feasible = largest(trial.fits, trial.rows)
    seen: dict[str, Any] = {}

    def guarded(trial: Trial) -> tuple[int, int]:
        seen.update(compared(trial))
        return len(seen["sizes"]) - 1, seen["sizes"][-1]

    tools = tried(trial, feasible, {**TOOLS, "oomguard": guarded})
    found = {**trial.case, "feasible": feasible, "capacity": trial.capacity, **tools, **seen}
    return {**found, "gpu": trial.place.name(), "took_s": round(time.monotonic() - began_s, 2)}


def is_miss(found: dict[str, Any]) -> bool:
    """Tell whether a result differs from the whole call's, and on a GPU from that of a loop in the
    same sizes.
    """
    return bool(found["differs"] and found.get("differs_from_loop", found["differs"]))


def is_odd(found: dict[str, Any]) -> bool:
    """Tell whether a case that ran is worth a line for its results."""
    return bool(
        found["oomguard"] and (found["differs"] or twice(found) or found.get("alive_bytes", 0) > 0)
    )


def twice(found: dict[str, Any]) -> bool:
    """Tell whether rows were computed that were neither new nor of an attempt that failed."""
    failed = found["sizes"][:-1]
    return (
        found["seen"] is not None
        and found["seen"] > found["rows"] + sum(size or found["rows"] for size in failed) + 0.5
    )


def load(device: str = "simulated") -> None:
    """Import the models of all families, and start the device: both take longer than a case."""
    import torch
    import transformers as hf

    torch.set_num_threads(1)
    for pattern in PATTERNS.values():
        for family in pattern.families:
            getattr(hf, pattern.head)._model_mapping[type(hf.AutoConfig.for_model(family))]
    DEVICES[device]().prepare()
    gc.freeze()  # what is imported lives as long as the process: no collection has to look at it


def main() -> None:
    used, left_out = used_cases(
        __doc__, 1200, run_case, is_odd, load=load, per_worker=200, devices=list(DEVICES)
    )
    kinds, families = ({r[key] for r in used if key in r} for key in ("pattern", "family"))
    print(
        f"{len(used)} cases, {len(kinds)} kinds of call, {len(families)} families; {left_out} left "
        "out"
    )
    ran = [r for r in used if r["oomguard"]]
    differ = collections.Counter(r["pattern"] for r in ran if is_miss(r))
    again = sum(twice(r) for r in ran)
    print(
        f"results that differ: {sum(differ.values())} {dict(differ)}; rows computed twice: in "
        f"{again} cases"
    )
    line, met = told(used)
    line = (
        f"{line}; {sum(differ.values())} results differ, rows were computed twice in {again} cases "
        "(goal: 0)"
    )
    if gpus := sorted({r["gpu"] for r in ran if r["gpu"]}):
        more, kept = told_of_gpu(ran)
        line = f"{line}; {more}; on {', '.join(gpus)}"
        met = met and not kept
    conclude(line, met=met and not differ and not again)


def told_of_gpu(ran: list[dict[str, Any]]) -> tuple[str, int]:
    """Print what only a GPU shows; return it in short, and in how many cases more was alive than
    before.
    """
    as_loop = collections.Counter(r["pattern"] for r in ran if r["differs"] and not is_miss(r))
    kept, kept_later = (
        sum(r[key] > 0 for r in ran) for key in ("alive_bytes", "alive_later_bytes")
    )
    whole_s, guard_s = (sum(r[key] for r in ran) / len(ran) for key in ("took_s", "guard_s"))
    print(
        "differ from the whole call as a bare loop of the same sizes does: "
        f"{sum(as_loop.values())} {dict(as_loop)}"
    )
    print(
        f"more alive after the guarded call than before and its result: {kept}, after a collection "
        f"{kept_later}"
    )
    print(f"seconds a case: {whole_s:.2f}, of them under the guard {guard_s:.2f}")
    more = (
        f"{sum(as_loop.values())} more differ as a bare loop of the same sizes does; more stays "
        f"alive in {kept} cases (goal: 0)"
    )
    return more, kept


if __name__ == "__main__":
    main()
