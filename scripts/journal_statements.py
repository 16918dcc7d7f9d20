"""Write oomguard/journal/sqlite.toml: what the journal's tables and statements compile to for SQLite.

python scripts/journal_statements.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from typing import Any

from sqlalchemy import create_mock_engine
from sqlalchemy.dialects import sqlite

from oomguard.journal.schema_version import SCHEMA_VERSION
from oomguard.journal.sqlite_file import STATEMENTS
from oomguard.journal.tables import METADATA, VERSION
from oomguard.journal.writing import OF_A_FILE

_HEAD = """\
# What a run writes into a journal's file, compiled from tables.py and writing.py for SQLite, so that no run has to load SQLAlchemy.
# Made by scripts/journal_statements.py, which a test holds against those files; nobody edits it.
"""


def text() -> str:
    """Return the file."""
    parts = [f"{_HEAD}\n# A new file, in one transaction.\nschema = ["]
    parts += [f'"""\n{statement}""",' for statement in _schema()]
    parts += ["]", "", "[statements]"]
    parts += [f'{name} = """\n{_compiled(statement)}"""' for name, statement in OF_A_FILE.items()]
    return "\n".join(parts) + "\n"


def _schema() -> list[str]:
    found: list[str] = []
    engine = create_mock_engine("sqlite://", lambda statement, *_, **__: found.append(_compiled(statement)))
    METADATA.create_all(engine, checkfirst=False)
    found.append(_compiled(VERSION.insert().values(version_num=str(SCHEMA_VERSION)), literal_binds=True))
    return [*found, f"PRAGMA user_version = {SCHEMA_VERSION}"]


def _compiled(statement: Any, **how: Any) -> str:
    compiled = statement.compile(dialect=sqlite.dialect(paramstyle="named"), compile_kwargs=how)
    return textwrap.fill(" ".join(str(compiled).split()), 130, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the file, or say whether it is as it would be written."""
    if sys.argv[1:] == ["--check"]:
        if STATEMENTS.read_text(encoding="utf-8") == text():
            return 0
        print(f"{STATEMENTS} is not what the tables and statements compile to: python {sys.argv[0]}", file=sys.stderr)
        return 1
    STATEMENTS.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
