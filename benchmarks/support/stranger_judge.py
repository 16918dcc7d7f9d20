"""What a tester says of a run: the cause, the share kept, and what was changed that must not be."""

from typing import Any

from support.stranger_case import written_text

EFFECTS = (
    "output-preserving",
    "reduces-capacity",
    "changes-outputs",
)  # each permits those before it


def can_run(case: dict[str, Any]) -> bool:
    """Tell whether the tester says that some change makes it run."""
    return "unfixable" not in case["causes"]


def is_broken_here(seen: dict[str, Any]) -> bool:
    """Tell whether it failed at first: what asks for 32 GiB starts where there are 64."""
    return not seen["runs"] or seen["relaunches"] > 0


def has_right_cause(case: dict[str, Any], seen: dict[str, Any], reading: dict[str, Any]) -> bool:
    """Tell whether the first failure's first cause is one that counts; where none does, whether no
    memory was named.
    """
    right = reading["causes"][case["name"]]
    if right:
        return seen["cause"] in right
    return not seen["is_oom"]


def kept(case: dict[str, Any], seen: dict[str, Any], reading: dict[str, Any]) -> float:
    """Return the share of the tester's best value that the last attempt kept, 0 where it does not
    run or broke a word.

    Where the tester names an interval, its inside is 1. Where another setting was changed, and none
    that must not be, it is 1 too.
    """
    if not seen["runs"] or forbidden(case, seen, reading):
        return 0.0
    best = case["best"]
    last = (seen["attempts"] or [{}])[-1]
    shares = [
        _share(best, _before(setting, seen), last[setting])
        for setting in judged(case, reading)
        if last.get(setting) is not None
    ]
    return min(shares, default=1.0)


def is_exact(best: dict[str, Any]) -> bool:
    """Tell whether the tester names one value rather than an interval around it."""
    return isinstance(best["value"], int | float) and (
        best["low"] is None or best["value"] == best["high"]
    )


def judged(case: dict[str, Any], reading: dict[str, Any]) -> list[str]:
    """Return the settings whose value the tester judges, none where there is nothing to change."""
    named = (case["best"]["setting"] or "").split(" or ")
    return [reading["settings"].get(name, name) for name in named if name]


def forbidden(case: dict[str, Any], seen: dict[str, Any], reading: dict[str, Any]) -> list[str]:
    """Return what any attempt changed that must not be, or that was not permitted."""
    found = [text for text in case["must_not_change"] if _is_broken_word(text, seen, reading)]
    permitted = EFFECTS.index(next((word for word in case["allow"] if word in EFFECTS), EFFECTS[0]))
    text = written_text(case)
    never_given = reading.get("never_given", {}).get(case["name"], [])
    for patch in seen["patches"]:
        setting = patch["setting"]
        is_given = setting not in never_given and (
            setting in text or setting.replace("_", "-") in text
        )
        # Capacity may be taken unasked from what the user left alone (docs/how-to/run.md), outputs never.
        if is_given:
            limit = permitted
        else:
            limit = max(permitted, 1)
        if EFFECTS.index(patch["effect"]) > limit:
            found.append(f"{setting} ({patch['effect']})")
    return list(dict.fromkeys(found))


def _is_broken_word(text: str, seen: dict[str, Any], readings: dict[str, Any]) -> bool:
    reading = readings["must_not_change"].get(text, {"setting": text})
    if "no_setting" in reading:
        return False
    if "any_setting" in reading:
        return seen["relaunches"] > 0 or any(seen["attempts"])
    return any(reading["setting"] in settings for settings in seen["attempts"])


def _before(setting: str, seen: dict[str, Any]) -> float | None:
    """Return the value that the user's own command had, None where nobody told."""
    values = [patch["from"] for patch in seen["patches"] if patch["setting"] == setting]
    if values and isinstance(values[0], int | float):
        return float(values[0])
    return None


def _share(best: dict[str, Any], old: float | None, found: Any) -> float:
    """Compare with the value, else with the interval's edge on the side of what was lost."""
    new = float(found)
    raised = old is not None and new > old
    if is_exact(best):
        edge = float(best["value"])
    elif best["low"] is None or (raised and best["high"] is None):
        return (
            1.0 if best["low"] is None or new >= best["low"] else 0.0
        )  # no number above it to compare with
    else:
        edge = float(best["high"] if raised else best["low"])
    return min(1.0, edge / new if raised else new / edge)
