"""Figure: what oomguard relies on in vLLM, held against the sources of released wheels, by version;
nothing is installed or run.

Flags, defaults, hooks, environment variables, log wordings. Printed are what the sources do not
bear out, and what moved from each version to the next. Wheels are kept unzipped in .sources/vllm;
with versions as arguments those are read in place of the sampled ones.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from oomguard.engines.vllm.package import is_known, verified_versions
from support.figure import conclude, skip
from support.vllm_guard import guard_rows, recovers, recovery_rows
from support.vllm_names import cited_rows, command_rows, endpoint_rows, import_rows, variable_rows
from support.vllm_printed import log_rows, printed_rows
from support.vllm_rows import Row, argument_rows, caller_rows, server_rows
from support.vllm_wheels import newest, package_of

HERE = Path(__file__).parent
CACHE = HERE.parent / ".sources" / "vllm"
DATA = HERE / "data" / "vllm_versions.toml"


def stated() -> dict[str, Any]:
    """Return in which versions each thing is there that only some have."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def relied_on(package: Path, version: str, data: dict[str, Any]) -> Iterator[Row]:
    """Yield all that is relied on in one version."""
    yield from argument_rows(package, version, data["flags"])
    yield from server_rows(package, version, data["flags"])
    yield from caller_rows(package, version, data["callers"])
    yield from variable_rows(package, version, data["variables"])
    yield from import_rows(package, version, data["imports"])
    yield from guard_rows(package, version, data["guard"])
    if recovers(version):
        yield from recovery_rows(package, version)
    yield from endpoint_rows(package, version, data["endpoints"])
    yield from cited_rows(package, version)
    yield from command_rows(package, version, data["commands"])
    yield from printed_rows(package, version, data["printed"])
    yield from log_rows(package, version)


def moved(before: list[Row], after: list[Row]) -> Iterator[str]:
    """Yield what is told otherwise by the sources of one version than by those of the version
    before.
    """
    known = {(row.kind, row.name): row for row in before}
    for row in after:
        old = known.get((row.kind, row.name))
        if old is None:
            continue
        if old.found != row.found:
            yield f"{row.kind} {row.name}: {old.found} -> {row.found}"
        elif old.place != row.place:
            yield f"{row.kind} {row.name}: {old.place or 'nowhere'} -> {row.place or 'nowhere'}"


def asked_versions(asked: list[str], sampled: list[str]) -> list[str]:
    """Return the versions to read; the newest of the registry among them where none was asked for,
    and it can be reached.
    """
    if asked:
        return asked
    try:
        latest = [newest(CACHE)]
    except subprocess.CalledProcessError as error:
        print(f"the newest version is not known: {_last_line(error)}")
        latest = []
    return sorted({*sampled, *latest}, key=Version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions",
        nargs="*",
        help="releases to read; 'table' for all that the program knows as verified",
    )
    asked = parser.parse_args().versions
    data = stated()
    if asked == ["table"]:
        versions = list(verified_versions())
    else:
        versions = asked_versions(asked, data["sampled"])
    problems = 0
    count = 0
    read = list[str]()
    before = list[Row]()
    for version in versions:
        try:
            package = package_of(version, CACHE)
        except subprocess.CalledProcessError as error:
            print(f"\n{version}: no wheel can be had: {_last_line(error)}")
            continue
        rows = list(relied_on(package, version, data))
        wrong = [row for row in rows if not row.holds]
        print(f"\n{version}: {len(rows) - len(wrong)} of {len(rows)} as stated")
        for row in wrong:
            print(
                f"  NOT AS STATED  {row.kind} {row.name}: stated {row.stated}, found {row.found} {row.place}".rstrip()
            )
        if not is_known(version):
            print(
                "  NOT IN THE TABLE  oomguard/engines/vllm/verified.toml: read what moved, mend "
                "the data, then name it there"
            )
            wrong.append(rows[0])
        for line in moved(before, rows) if before else ():
            print(f"  moved since {read[-1]}  {line}")
        sys.stdout.flush()
        problems = problems + len(wrong)
        count = count + len(rows)
        before = rows
        read.append(version)
    if not read:
        skip("no wheel can be had")
    conclude(
        f"vLLM {read[0]} to {read[-1]}, {len(read)} of {len(versions)} versions: "
        f"{count - problems} of {count} as stated (goal: all)",
        met=not problems and read == versions,
    )


def _last_line(error: subprocess.CalledProcessError) -> str:
    return (error.stderr or str(error)).strip().splitlines()[-1]


if __name__ == "__main__":
    main()
