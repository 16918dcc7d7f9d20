"""The journal's tables, version by version; an older file is migrated in place, a newer one is left alone."""

from __future__ import annotations

import sqlite3
from typing import Final

SCHEMA_VERSION: Final = 4
_SCHEMA_1: Final = (
    """
CREATE TABLE IF NOT EXISTS attempt (
  id INTEGER PRIMARY KEY,
  session TEXT NOT NULL,           -- one oomguard run, or one guarded call
  number INTEGER NOT NULL,         -- 1 is the first attempt
  started_at REAL NOT NULL,        -- Unix seconds
  ended_at REAL,                   -- NULL while it runs
  command TEXT NOT NULL,           -- JSON list, secrets masked
  settings TEXT NOT NULL,          -- JSON object: what oomguard changed so far
  patches TEXT NOT NULL,           -- JSON list of the contract's patches, applied before this attempt
  incident TEXT,                   -- JSON object of the contract, NULL where none was found
  predicted TEXT NOT NULL,         -- JSON object
  measured TEXT NOT NULL,          -- JSON object
  exit_status INTEGER
)""",
)
# An oomguard of schema 1 that runs since before the migration goes on writing attempts: the trigger gives them a run.
_SCHEMA_2: Final = (
    """
CREATE TABLE run (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  session TEXT NOT NULL UNIQUE,
  original TEXT NOT NULL,          -- JSON list: the command as it was given, before any patch, secrets masked
  folder TEXT,                     -- the working directory; NULL where it was not recorded, as all below
  files TEXT,                      -- digest of the files that the command names: its script, its configuration
  engine TEXT,
  engine_version TEXT,
  model TEXT,                      -- masked
  device TEXT,                     -- name and size of the GPUs
  forgotten INTEGER NOT NULL DEFAULT 0
)""",
    "ALTER TABLE attempt ADD COLUMN set_by_user TEXT",  # JSON object: setting -> whether the user had set it
    "CREATE INDEX attempt_session ON attempt (session, number)",
    """
INSERT INTO run (session, original, engine, engine_version)
SELECT a.session, a.command, json_extract(f.incident, '$.framework'), json_extract(f.incident, '$.framework_version')
FROM (SELECT session, min(id) AS first, max(CASE WHEN incident IS NOT NULL THEN id END) AS failed FROM attempt GROUP BY session) s
JOIN attempt a ON a.id = s.first LEFT JOIN attempt f ON f.id = s.failed
ORDER BY s.first""",
    """
CREATE TRIGGER attempt_of_no_run AFTER INSERT ON attempt
WHEN NOT EXISTS (SELECT 1 FROM run WHERE session = NEW.session)
BEGIN INSERT INTO run (session, original) VALUES (NEW.session, NEW.command); END""",
)
_SCHEMA_3: Final = (
    # Whether masking hid secrets alone of the original, so that another command looks different; NULL where it was not recorded.
    "ALTER TABLE run ADD COLUMN hides_secrets_alone INTEGER",
)
_SCHEMA_4: Final = (
    # Why it failed, in the run's own words, where its status tells less: it hung and was ended. NULL: as status and incident tell.
    "ALTER TABLE attempt ADD COLUMN error TEXT",
)
_STEPS: Final = (_SCHEMA_1, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4)


def version_of(database: sqlite3.Connection) -> int:
    """Return the schema of a file, 0 of an empty one.

    Raises:
        sqlite3.DatabaseError: a newer oomguard wrote it, or another program.
    """
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"written by a newer oomguard (schema {version}, this one reads {SCHEMA_VERSION})")
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if (version and "attempt" not in tables) or (tables and "attempt" not in tables):
        raise sqlite3.DatabaseError("a database of another program, no journal")
    return version


def prepare(database: sqlite3.Connection) -> None:
    """Give a file this version's tables, where it has not got them; all of its records stay.

    Raises:
        sqlite3.Error: as ``version_of``, or it cannot be written.
    """
    if version_of(database) == SCHEMA_VERSION:  # to lock it each time would lock out those that write at once
        return
    database.execute("BEGIN IMMEDIATE")
    for step in _STEPS[version_of(database) :]:  # another may have been faster
        for statement in step:
            database.execute(statement)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
