"""Results of single cases kept in a file, so that a benchmark that was interrupted goes on where it
stopped.
"""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.commands import ROOT

_MEASURED = ("oomguard", "rules", "benchmarks")


def tree() -> str:
    """Name what is measured: the commit, and a hash of what differs from it; without git a hash of
    the sources.
    """

    def git(*command: str) -> bytes:
        return subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, check=True
        ).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        changed = git("diff", "HEAD", "--", *_MEASURED)
    except (
        OSError,
        subprocess.CalledProcessError,
    ):  # a copy of the files, as on a machine that is lent
        return f"sources+{_hash_of_sources()}"
    if changed:
        return f"{commit}+{hashlib.sha256(changed).hexdigest()[:12]}"
    return commit


def _hash_of_sources() -> str:
    found = hashlib.sha256()
    for path in sorted(path for folder in _MEASURED for path in (ROOT / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Results:
    """Results by case, one JSON line each; those of another commit are kept in the file and not
    used.

    Args:
        path: the file; None keeps nothing.
        any_tree: whether results of another commit are used too.
    """

    def __init__(self, path: Path | None, *, any_tree: bool = False) -> None:
        self._path = path
        self._tree = ""
        self._known = {}
        if path is None:
            return
        self._tree = tree()
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
        else:
            lines = []
        for row in (
            json.loads(line) for line in lines if line.endswith("}")
        ):  # the last may be half written
            if any_tree or row["tree"] == self._tree:
                self._known[row["case"]] = row["result"]

    def get(self, case: str) -> Any | None:
        """Return the case's result on this commit, None where it has not run."""
        return self._known.get(case)

    def add(self, case: str, result: Any) -> None:
        """Keep a result at once."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"tree": self._tree, "case": case, "result": result}) + "\n")

    def kept(self, case: str, run: Callable[[], Any]) -> Any:
        """Return the case's result on this commit; where there is none, run it and keep what comes
        back.
        """
        if case not in self._known:
            self._known[case] = run()
            self.add(case, self._known[case])
        return self._known[case]
