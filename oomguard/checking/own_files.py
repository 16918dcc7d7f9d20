"""Checks of oomguard's own files: the journal and the rules."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from oomguard.errors import UsageError
from oomguard.journal.location import JournalUrl, Location, default_path
from oomguard.observe.check import Check

_BUSY_S: Final = 2.0


def journal_check(given: Location | None) -> Check:
    """Check where the journal is, and that it can be read and written; nothing is made.

    Args:
        given: the file, or the shared database; None for the file in the user's state folder.
    """
    if isinstance(given, JournalUrl):
        return _counted(given, "is the server there? what runs write meanwhile waits on their machines")
    path = given or default_path()
    elsewhere = "export XDG_STATE_HOME=DIR, or oomguard run --journal PATH"
    try:
        there = path.exists()
        folder = path if there else next(parent for parent in path.absolute().parents if parent.exists())
        if not os.access(folder, os.W_OK) or not (there or folder.is_dir()):
            return Check("journal", "problem", f"the journal {path} cannot be written", elsewhere)
        if not there:
            return Check("journal", "ok", f"journal: {path}, made by the first oomguard run")
    except (OSError, ValueError) as error:
        return Check("journal", "problem", f"the journal {path} cannot be read: {error}", elsewhere)
    return _counted(path, elsewhere)


def _counted(place: Location, hint: str) -> Check:
    from oomguard.journal.read import open_journal

    try:
        with open_journal(place, busy_s=_BUSY_S) as database:
            count = 0 if database is None else database.query("SELECT count(*) FROM attempt")[0][0]
    except UsageError as error:
        # reading names the place first
        why = f"{error}".removeprefix(f"{place}: ")
        newer = error.hint if why.startswith("written by a newer oomguard") else None
        return Check("journal", "problem", f"the journal {place} cannot be read: {why}", newer or hint)
    except ImportError as error:
        return Check("journal", "problem", f"the journal {place} cannot be read: {error}", hint)
    return Check("journal", "ok", f"journal: {place}, {count} attempts")


def rules_check(folders: Iterable[str]) -> Check:
    """Check that every rule file loads, ours and those of the folders given."""
    from oomguard.rules.load import load_rules

    try:
        found = load_rules([Path(folder) for folder in folders], check=True)
    except UsageError as error:
        return Check("rules", "problem", f"{error}", error.hint or "oomguard rules check")
    return Check("rules", "ok", f"rules: {len(found.rules)} rules and {len(found.signatures)} signature files load")
