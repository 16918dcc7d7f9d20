"""Fit the constants of a start that no formula gives, and print how they do on starts that they
were not fitted on.

``--write`` writes oomguard/estimate/fitted.toml. Each group of a version and a device is predicted by
constants that the other groups give; what a plan keeps back follows from by how much those
predictions are too large, and the range that it states is widened until nine in ten of them lie
inside.

support/fit_parts.py fits the parts: CUDA graphs by what is captured, non-torch memory by ranks,
links and version, encoders by version; support/held_out.py predicts each group by the others.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from oomguard.estimate import constants
from support.figure import conclude
from support.fit_parts import weighted_quantile
from support.held_out import KINDS, counted, fit, held_out, sure
from support.published import published

FITTED = Path(constants.__file__).with_name("fitted.toml")
COVERED = 0.9
# What a plan keeps back is what so many starts took at most beyond the parts, in spreads of the
# pool; which of these costs what is printed. A group of so many starts of a known GPU has its own
# parts, and keeps nothing back.
KEPT_QUANTILE = 0.7
QUANTILES = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8)
MEASURED_STARTS = 5
# What a start of another kind counts.
OTHER_KIND = 0.1
LEAST_FACTOR = 0.15
GOALS = {
    "pool median": 2.5,
    "pool mean": 5,
    "too large": 10,
    "width": 12,
    "graphs": 20,
    "activation": 5,
    "non_torch": 0.15,
}


def rules_of(records: list[dict[str, Any]], quantile: float) -> dict[str, dict[str, Any]]:
    """Return for each kind of start what a plan keeps back of its pool, and how its range is
    widened.

    The reserve is a quantile of what starts took beyond the parts, in spreads of the pool. Less
    it, as many predictions lie beyond either end of the range. Starts of other kinds count a
    little, so that a kind of few starts is not taken at their word.
    """
    found = {}
    for kind in KINDS:
        weights = [1.0 if r["row"]["kind"] == kind else OTHER_KIND for r in records]
        reserve = _reserve(records, weights, quantile)
        found[kind] = {
            **_factors(records, weights, reserve),
            "reserve_ratio": round(reserve, 3),
            "reserve_quantile": quantile,
            "starts": weights.count(1.0),
        }
    return found


def _reserve(records: list[dict[str, Any]], weights: list[float], quantile: float) -> float:
    if not quantile:
        return 0.0
    beyond = [r["beyond_gib"] / r["spread_gib"] for r in records]
    return max(0.0, weighted_quantile(list(zip(beyond, weights, strict=True)), quantile))


def _factors(
    records: list[dict[str, Any]], weights: list[float], reserve: float
) -> dict[str, float]:
    below = []
    above = []
    for record in records:
        beyond = record["beyond_gib"] - reserve * record["spread_gib"] * may_keep_back(record)
        below.append(beyond / record["spread_gib"])
        above.append((-beyond - record["more_gib"]) / record["spread_gib"])
    return {
        "factor_below": _factor(below, weights),
        "factor_above": _factor(above, weights),
    }


def _factor(misses: list[float], weights: list[float]) -> float:
    # One start more than were seen may be farther off than all of them.
    share = (1 + COVERED) / 2 * (1 + 1 / sum(weights))
    found = weighted_quantile(list(zip(misses, weights, strict=True)), min(1.0, share))
    return round(max(LEAST_FACTOR, found), 2)


def may_keep_back(record: dict[str, Any]) -> bool:
    """Return whether a plan keeps something back of such a start's pool."""
    return not record["row"]["spans"]


def keep_back(
    pools: list[dict[str, Any]], quantile: float, by: str = "group"
) -> list[dict[str, Any]]:
    """Return the predictions less what is kept back of each, and with the range of each, as the
    other groups' starts say.
    """
    found = []
    for group in sorted({record["row"][by] for record in pools}):
        rules = rules_of([other for other in pools if other["row"][by] != group], quantile)
        own = [record for record in pools if record["row"][by] == group]
        found += [_less(rules[record["row"]["kind"]], record) for record in own]
    return found


def _less(rule: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    reserve = rule["reserve_ratio"] * record["spread_gib"] * may_keep_back(record)
    beyond = record["beyond_gib"] - reserve
    wide_gib = wide(record, rule)
    return {
        **record,
        "pool": beyond / record["pool_gib"],
        "beyond_gib": beyond,
        "wide_gib": wide_gib,
    }


def too_large(records: list[dict[str, Any]]) -> float:
    return statistics.fmean(record["pool"] > 0.05 for record in records)


def trade(pools: list[dict[str, Any]]) -> None:
    """Print what each quantile makes of the predictions."""
    whole = [record for record in pools if not record["row"]["spans"]]
    for quantile in QUANTILES:
        print(
            f"kept back by the quantile {quantile:4} of the others: "
            f"{_short(keep_back(whole, quantile))}"
        )


def _short(records: list[dict[str, Any]]) -> str:
    sizes = [abs(record["pool"]) for record in records]
    middle = statistics.median(sizes)
    mean = statistics.fmean(sizes)
    return f"median {middle:.2%}, mean {mean:.1%}, more than 5 % too large {too_large(records):.1%}"


def measured(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of which several starts were measured: versions on GPUs that are known by
    name.
    """
    sizes = Counter(r["row"]["group"] for r in records if r["row"]["known_gpu"] and sure(r["row"]))
    groups = [
        (*group.split(" ", 1), size)
        for group, size in sorted(sizes.items())
        if size >= MEASURED_STARTS
    ]
    return [{"version": version, "gpu": gpu, "starts": size} for version, gpu, size in groups]


def wide(record: dict[str, Any], rule: dict[str, Any]) -> tuple[float, float]:
    """The range of a start in GiB downwards and upwards, as start_budget.py has it."""
    size = record["spread_gib"]
    below = math.hypot(rule["factor_below"] * size, record["page_cache_gib"])
    return below, rule["factor_above"] * size + record["more_gib"]


def is_inside(record: dict[str, Any]) -> bool:
    below, above = record["wide_gib"]
    return bool(-above <= record["beyond_gib"] <= below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the constants of all rows")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each start")
    parser.add_argument(
        "--with",
        dest="more",
        type=Path,
        action="append",
        default=[],
        help="more records, of oomguard contribute",
    )
    asked = parser.parse_args()
    rows = counted(published(*asked.more))
    records = held_out(rows)
    pools = [record for record in records if record["pool"] is not None]
    trade(pools)
    as_predicted = pools
    pools = keep_back(pools, KEPT_QUANTILE)
    if asked.verbose:
        for record in sorted(pools, key=lambda record: record["pool"]):
            print(
                f"{record['row']['id']:42} {record['row']['group']:28} "
                f"{100 * record['pool']:+7.1f} %"
            )
    # Starts of which a plan says itself that they go one way or the other (page_cache_bytes) have
    # no one figure to be off by.
    spans = [record for record in pools if record["row"]["spans"]]
    pools = [record for record in pools if not record["row"]["spans"]]
    figures = [of_pools("all", pools)]
    figures.append(
        of_pools(
            "without unified memory and what its finder is unsure of",
            [r for r in pools if sure(r["row"])],
        )
    )
    if spans:
        inside = sum(map(is_inside, spans))
        with_them = 100 * statistics.fmean(abs(record["pool"]) for record in (*pools, *spans))
        said = f"{inside} inside the span stated, the mean of all with them {with_them:.1f} %"
        print(f"unified memory with the page cache counted or not, {len(spans)} starts: {said}")
    figures += [of_part(part, records) for part in ("graphs", "weights", "activation", "non_torch")]
    print("\n".join(text for text, _ in figures))
    if asked.write:
        rules = rules_of(as_predicted, KEPT_QUANTILE)
        write_tables({**fit(rows), "range": rules, "measured": measured(records)})
    by_set(rows)
    text = (
        f"pool, each group by the others: {figures[0][0].split(': ', 1)[1]}; graphs "
        f"{figures[2][0].split(': ', 1)[1]}"
    )
    conclude(text, met=all(met for _, met in figures))


def by_set(rows: list[dict[str, Any]]) -> None:
    """Print how each set of starts that was gathered together is predicted by the other sets: what
    a stranger's start may expect.
    """
    records = held_out(rows, by="gathered")
    pools = keep_back(
        [record for record in records if record["pool"] is not None], KEPT_QUANTILE, by="gathered"
    )
    pools = [record for record in pools if not record["row"]["spans"]]
    for name in sorted({record["row"]["gathered"] for record in pools}):
        print(
            of_pools(
                f"the set {name} by the others", [r for r in pools if r["row"]["gathered"] == name]
            )[0]
        )
    print(of_pools("each gathered set by the others", pools)[0])


def of_pools(name: str, records: list[dict[str, Any]]) -> tuple[str, bool]:
    sizes = [abs(100 * record["pool"]) for record in records]
    large = 100 * statistics.fmean(record["pool"] > 0.05 for record in records)
    share = statistics.fmean(map(is_inside, records))
    low, high = wilson(share, len(records))
    width = statistics.median(
        100 * sum(record["wide_gib"]) / record["pool_gib"] for record in records
    )
    median = statistics.median(sizes)
    mean = statistics.fmean(sizes)
    text = (
        f"pool, {name}: median {median:.2f} % (goal {GOALS['pool median']}), mean {mean:.1f} % "
        f"({GOALS['pool mean']}), "
        f"more than 5 % too large {large:.1f} % ({GOALS['too large']}), inside the stated 90 % "
        f"range {100 * share:.0f} % "
        f"({100 * low:.0f} to {100 * high:.0f}), which is {width:.1f} % wide ({GOALS['width']}), n "
        f"= {len(records)}"
    )
    goals = (
        median <= GOALS["pool median"],
        mean <= GOALS["pool mean"],
        large <= GOALS["too large"],
    )
    return text, all(goals) and low <= COVERED <= high and width <= GOALS["width"]


def of_part(part: str, records: list[dict[str, Any]]) -> tuple[str, bool]:
    found = [record[part] for record in records if record.get(part) is not None]
    unit, scale = (" GiB", 1) if part == "non_torch" else (" %", 100)
    sizes = [abs(scale * value) for value in found]
    median = statistics.median(sizes)
    goal = GOALS.get(part)
    if goal:
        beside = f" (goal {goal})"
    else:
        beside = ""
    text = (
        f"{part}: median {median:.2f}{unit}{beside}, mean {statistics.fmean(sizes):.2f}{unit}, n = "
        f"{len(found)}"
    )
    return text, goal is None or median <= goal


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of so many."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        / (1 + z * z / count)
    )
    return middle - half, middle + half


def write_tables(tables: dict[str, Any]) -> None:
    """Write the constants as TOML, each with the number of starts that it comes from."""
    lines = [
        (
            "# Written by benchmarks/fit_constants.py --write from published or measured starts. "
            "Do not edit."
        ),
        "",
    ]
    for name, table in tables.items():
        if isinstance(table, list):
            parts = [(f"[[{name}]]", row) for row in table]
        else:
            parts = []
        parts += (
            [(f"[{name}.{kind}]", row) for kind, row in table.items()]
            if isinstance(table, dict)
            else []
        )
        for head, row in parts:
            lines += [head, *(f"{key} = {json.dumps(value)}" for key, value in row.items()), ""]
    FITTED.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
