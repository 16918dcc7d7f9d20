"""Checks of oomguard's own files: the journal and the rules."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from oomguard.errors import UsageError
from oomguard.observe.check import Check


def journal_check(given: str | None) -> Check:
    """Check where the journal is, and that it can be read and written; nothing is made.

    Args:
        given: its path; None for the user's state folder.
    """
    import sqlite3

    from oomguard.journal.store import SCHEMA_VERSION, default_path

    path = Path(given) if given else default_path()
    elsewhere = "export XDG_STATE_HOME=DIR, or oomguard run --journal PATH"
    try:
        there = path.exists()
        folder = path if there else next(parent for parent in path.absolute().parents if parent.exists())
        if not os.access(folder, os.W_OK) or not (there or folder.is_dir()):
            return Check("journal", "problem", f"the journal {path} cannot be written", elsewhere)
        if not there:
            return Check("journal", "ok", f"journal: {path}, made by the first oomguard run")
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=2)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            count = database.execute("SELECT count(*) FROM attempt").fetchone()[0] if version else 0
    except (OSError, ValueError, sqlite3.Error) as error:
        return Check("journal", "problem", f"the journal {path} cannot be read: {error}", elsewhere)
    if version > SCHEMA_VERSION:
        text = f"the journal {path} was written by a newer oomguard (schema {version})"
        return Check("journal", "problem", text, "pip install --upgrade oomguard")
    return Check("journal", "ok", f"journal: {path}, {count} attempts")


def rules_check(folders: Iterable[str]) -> Check:
    """Check that every rule file loads, ours and those of the folders given."""
    from oomguard.rules.load import load_rules

    try:
        found = load_rules([Path(folder) for folder in folders], check=True)
    except UsageError as error:
        return Check("rules", "problem", f"{error}", error.hint or "oomguard rules check")
    return Check("rules", "ok", f"rules: {len(found.rules)} rules and {len(found.signatures)} signature files load")
