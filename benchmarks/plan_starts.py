"""Figures of `oomguard plan` on starts of vLLM that others published: ``plan_starts.py [FILE …]``.

Without a file: all starts that the constants were fitted on, so these are training figures. A file
has one JSON object a line, as benchmarks/data/starts.jsonl; ``--without-transformers`` plans as the
default install does. A start of a file was made, unless it has ``"refused": true``.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from oomguard.core.facts import GIB
from oomguard.estimate.model import parameters
from support.figure import conclude
from support.published import graphs_gib, of_stage, part_gib, planned, pool_gib, published

OPTIMISTIC_PERCENT = 5


def read_starts(files: list[Path]) -> list[dict[str, Any]]:
    """Return the starts of the files, or all that are here."""
    if not files:
        return published()
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def record_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of one start's plan in percent; signed."""
    began = time.perf_counter()
    plan = of_stage(planned(row), row.get("stage"))
    found: dict[str, Any] = {"id": row["id"], "s": time.perf_counter() - began}
    if isinstance(plan, str):
        return {**found, "refused": plan}
    printed = row["printed"]
    found["fit"] = plan["fit"]
    pool = pool_gib(row, plan)
    if pool and pool > 0:
        mine = plan["kv_cache_pool_bytes"] / GIB
        below = plan["uncertainty_bytes"] / GIB
        above = plan["uncertainty_above_bytes"] / GIB
        found["pool"] = 100 * (mine / pool - 1)
        found["inside"] = mine - below <= pool <= mine + above
        found["width"] = 100 * (below + above) / pool
        need = mine - plan["margin_bytes"] / GIB
        found["refuses"] = bool(row.get("refused")) or pool < need
    elif row.get("refused") or (pool is not None and pool <= 0):
        found["refuses"] = True
    if printed.get("kv_tokens"):
        found["tokens"] = 100 * (plan["kv_cache_tokens"] / printed["kv_tokens"] - 1)
    graphs = graphs_gib(row)
    if graphs and plan["cudagraph_bytes"]:
        found["graphs"] = 100 * (plan["cudagraph_bytes"] / GIB / graphs - 1)
    for part, name in (("weights", "weights_gib"), ("activation", "peak_activation_gib")):
        if printed.get(name):
            found[part] = 100 * (part_gib(plan, part) / printed[name] - 1)
    return found


def line_of(record: dict[str, Any]) -> str:
    errors = [
        f"{name} {record[name]:+.1f} %"
        for name in ("pool", "tokens", "weights", "activation", "graphs")
        if name in record
    ]
    return f"{record['id']:44} {record.get('fit', 'refused'):7} {', '.join(errors)}"


def summary(records: list[dict[str, Any]], name: str) -> str:
    sizes = [abs(record[name]) for record in records if name in record]
    if not sizes:
        return f"{name} -"
    return f"{name} median {statistics.median(sizes):.2f} % mean {statistics.fmean(sizes):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each start")
    asked = parser.parse_args()
    if asked.without_transformers:
        parameters.is_transformers_here = lambda: False
    records = [record_of(row) for row in read_starts(asked.files)]
    for record in records:
        if asked.verbose or "refused" in record:
            print(line_of(record), record.get("refused", ""))
    planned_ones = [record for record in records if "refused" not in record]
    pools = [record for record in planned_ones if "pool" in record]
    sure = [record for record in planned_ones if record["fit"] == "yes"]
    wrong_yes = [record["id"] for record in sure if record.get("refuses")]
    wrong_no = [
        record["id"]
        for record in planned_ones
        if record["fit"] == "no" and record.get("refuses") is False
    ]
    optimistic = [r["id"] for r in pools if r["pool"] > OPTIMISTIC_PERCENT and r["fit"] == "yes"]
    fits = Counter(record["fit"] for record in planned_ones)
    inside = sum(record["inside"] for record in pools) / max(1, len(pools))
    print(", ".join(summary(planned_ones, n) for n in ("pool", "tokens", "graphs")))
    print(", ".join(summary(planned_ones, n) for n in ("activation", "weights")))
    print(f"yes that the engine refuses: {wrong_yes}; no that it starts: {wrong_no}")
    print(f"more than {OPTIMISTIC_PERCENT} % optimistic with yes: {len(optimistic)} {optimistic}")
    width = statistics.median(r["width"] for r in pools) if pools else 0.0
    text = (
        f"{len(records)} starts: {dict(fits)}; inside the range {100 * inside:.0f} %, median width "
        f"{width:.1f} % of the pool; slowest plan "
        f"{max(r['s'] for r in records):.1f} s"
    )
    conclude(text, met=not wrong_yes and inside >= 0.9)


if __name__ == "__main__":
    main()
