"""The table that the package ships: by call, which classes have rows that do not depend on each
other, and why others have not.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from support.commands import ROOT

TABLE = ROOT / "oomguard" / "engines" / "transformers" / "row_independence.toml"
CALLS = ("forward", "generate")
_HEAD = """\
# Written by benchmarks/row_independence.py; do not edit.
# A class in no list is unknown. `numeric`: decided by comparing rows alone with rows next to others, not by following the code.
# `draws`: draws random numbers, so parts give other numbers than the whole call. `layout`: fields of the result in which the rows
# are not one entry each along axis 0. `entries = 0`: several for each row, as many for each; `interleaved`: the first entry
# of all rows comes first; `list = true`: a list with one tensor for each row; `rows = false`: no axis holds the rows.
"""

Table = dict[str, Any]


def read_table(path: Path) -> Table:
    """Return the table in a file; an empty one where there is none."""
    if path.is_file():
        return tomllib.loads(path.read_text(encoding="utf-8"))
    return {}


def verdicts_of(table: Table, call: str, version: str) -> dict[str, str]:
    """Return what a table says of a call in a version: an empty text where rows do not depend on
    each other, else the reason.
    """
    part = table.get(call, {})
    found = dict.fromkeys(part.get("independent", ()), "") | dict(part.get("dependent", {}))
    for name, by_version in part.get("by_version", {}).items():
        if version in by_version:
            found[name] = by_version[version]
    return found


def merged(table: Table, version: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with the results of a version; those of other versions and of classes that did
    not run stay.
    """
    versions = sorted({*table.get("transformers", ()), version}, key=Version)
    made: Table = {"transformers": versions}
    for call in CALLS:
        here = {name: one[call] for name, one in found.items() if call in one}
        told = {
            each: verdicts_of(table, call, each)
            for each in versions
            if each in table.get("transformers", ())
        }
        before = {name: why for name, why in told.get(version, {}).items() if name not in here}
        told[version] = before | {
            name: one["why"] for name, one in here.items() if one["verdict"] != "unknown"
        }
        made[call] = _call(versions, told, here) | _details(table.get(call, {}), here)
    return made


def _call(
    versions: list[str], told: Mapping[str, Mapping[str, str]], here: Mapping[str, Any]
) -> dict[str, Any]:
    independent = []
    dependent = {}
    by_version = {}
    for name in sorted({name for each in told.values() for name in each}):
        known = {each: told[each][name] for each in versions if name in told[each]}
        is_unknown_here = name in here and here[name]["verdict"] == "unknown"
        whys = set(map(bool, known.values()))
        if len(whys) > 1 or (is_unknown_here and known):
            by_version[name] = known
        elif whys == {True}:
            dependent[name] = list(known.values())[-1]
        else:
            independent.append(name)
    return {"independent": independent, "dependent": dependent, "by_version": by_version}


def _details(old: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of classes beside their verdicts: the newest result counts."""
    known = {name for name, one in here.items() if one["verdict"] != "unknown"}
    numeric = {name for name in old.get("numeric", ()) if name not in known}
    draws = {name for name in old.get("draws", ()) if name not in known}
    layout = {name: value for name, value in old.get("layout", {}).items() if name not in known}
    for name in known:
        one = here[name]
        numeric |= {name} if one["by"] == "numeric" else set()
        draws |= {name} if one["draws"] else set()
        if one["layout"]:
            layout[name] = one["layout"]
    return {
        "numeric": sorted(numeric),
        "draws": sorted(draws),
        "layout": dict(sorted(layout.items())),
    }


def written(table: Table) -> str:
    """Return a table as text, one class a line."""
    lines = [_HEAD, f"transformers = {json.dumps(table['transformers'])}"]
    for call in CALLS:
        part = table[call]
        lines.append(f"\n[{call}]")
        for name in ("independent", "numeric", "draws"):
            lines += [f"{name} = [", *(f"  {json.dumps(each)}," for each in part[name]), "]"]
        lines.append(f"\n[{call}.dependent]")
        lines += [f"{name} = {json.dumps(why)}" for name, why in part["dependent"].items()]
        lines.append(f"\n[{call}.by_version]")
        lines += [f"{name} = {_inline(known)}" for name, known in part["by_version"].items()]
        lines.append(f"\n[{call}.layout]")
        lines += [f"{name} = {_inline(fields)}" for name, fields in part["layout"].items()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_key(key)} = {_inline(entry)}" for key, entry in value.items()) + "}"
        )
    return json.dumps(value)


def _key(key: str) -> str:
    if key.replace("_", "").isalnum() and key.isascii():
        return key
    return json.dumps(key)
