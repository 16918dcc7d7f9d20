"""Judge oomguard.guard on patterns of other libraries' users: ``python run.py [--only name ...]
[--list] [--bare] [--again]``.

One line for each pattern, a summary, and results.json beside this file; what is in it already is
not run again.
Outcomes: equal; refused (a clear no); original error (the bare error); wrong (another result,
    silently); other error.
"""

import argparse
import collections
import importlib
import json
import logging
import os
import pathlib
import sys
import traceback
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

HERE = pathlib.Path(__file__).resolve().parent
MODULES = ("pipelines", "forward", "generate", "single", "vision", "speech", "libraries", "lm_eval", "code")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="these patterns, by name")
    parser.add_argument("--list", action="store_true", help="names, sources and what is expected")
    parser.add_argument("--bare", action="store_true", help="the bare side only: never enters the guard")
    parser.add_argument("--again", action="store_true", help="run what results.json has already")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path(os.environ.get("RESULTS", HERE / "results.json")))
    return parser.parse_args()


def one(pattern, bare: bool, checked: dict | None) -> dict:
    """A record of one pattern; a fault of the bare side drops it."""
    import harness

    try:
        if not bare:
            return harness.judge(pattern, checked)
        numbers, _, fault = harness.check_bare(pattern)
        return dict(name=pattern.name, **numbers, outcome="dropped" if fault else "bare side good", why=fault)
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-3:])
        return dict(name=pattern.name, outcome="dropped", why=f"{type(error).__name__}: {error}"[:300], trace=trace)


def good_side(record: dict | None) -> dict | None:
    """The bare side as checked before, where it was good."""
    if record and record["outcome"] == "bare side good":
        return record
    return None


def line(record: dict) -> str:
    """One line for the terminal."""
    detail = record.get("why") or record.get("error") or "; ".join(record.get("differences") or record.get("patches") or [])
    mark = {True: "as expected", False: "NOT AS EXPECTED"}.get(record.get("as_expected"), "")
    return (
        f"{record['name']:42} {record['outcome']:15} {mark:15} "
        f"{' '.join(str(detail).split())[:150]}"
    )


def main() -> int:
    """Run what is asked for."""
    wanted = arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(f"patterns_{module}")
    from registry import PATTERNS

    chosen = [p for p in PATTERNS.values() if not wanted.only or p.name in wanted.only]
    if wanted.list:
        for p in chosen:
            print(f"{p.name}: {p.source}. Expected: {p.expect}. Right: {', '.join(p.right)}")
        return 0
    bare_results = wanted.results.with_suffix(".bare.json")
    if wanted.bare:
        results = bare_results
    else:
        results = wanted.results
    if bare_results.exists():
        bare = json.loads(bare_results.read_text())
    else:
        bare = {}
    if results.exists():
        known = json.loads(results.read_text())
    else:
        known = {}
    for p in chosen:
        if wanted.again or wanted.only or p.name not in known:
            known[p.name] = one(p, wanted.bare, good_side(bare.get(p.name)))
            results.write_text(json.dumps(known, indent=1, default=str))
        print(line(known[p.name]), flush=True)
    counts = collections.Counter(known[p.name]["outcome"] for p in chosen if p.name in known)
    right = sum(bool(known[p.name].get("as_expected")) for p in chosen)
    print("\n" + ", ".join(f"{k}: {v}" for k, v in counts.most_common()), f"; as expected: {right}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
