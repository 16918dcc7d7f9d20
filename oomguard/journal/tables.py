"""The journal's tables as they are now; how older ones become these stands in migrations/."""

from __future__ import annotations

from typing import Final

from sqlalchemy import JSON, BigInteger, Column, Double, Index, Integer, MetaData, String, Table, Text, text

METADATA: Final = MetaData()
# SQLite counts rows by a column that is INTEGER and nothing else.
_NUMBER: Final = BigInteger().with_variant(Integer, "sqlite")

RUN: Final = Table(
    "run",
    METADATA,
    Column("number", _NUMBER, primary_key=True),
    Column("session", Text, nullable=False, unique=True),
    Column(
        "original", Text, nullable=False
    ),  # JSON list: the command as it was given, before any patch, secrets masked
    Column("folder", Text),  # the working directory; NULL where it was not recorded, as all below
    Column("files", Text),  # digest of the files that the command names: its script, its configuration
    Column("engine", Text),
    Column("engine_version", Text),
    Column("model", Text),  # masked
    Column("device", Text),  # name and size of the GPUs
    Column("forgotten", Integer, nullable=False, server_default=text("0")),
    Column(
        "hides_secrets_alone", Integer
    ),  # whether masking hid secrets alone of the original: other commands look different
    Column("who", Text),  # the user's name on the host
    Column("host", Text),
    Column(
        "clock_offset_s", Double
    ),  # in a shared journal: seconds that were added to the host's clock to have the database's
    sqlite_autoincrement=True,
)
ATTEMPT: Final = Table(
    "attempt",
    METADATA,
    Column("id", _NUMBER, primary_key=True),
    Column("session", Text, nullable=False),  # one oomguard run
    Column("number", Integer, nullable=False),  # 1 is the first attempt
    Column("started_at", Double, nullable=False),  # Unix seconds
    Column("ended_at", Double),  # NULL while it runs
    Column("command", Text, nullable=False),  # JSON list, secrets masked
    Column("settings", Text, nullable=False),  # JSON object: what oomguard changed so far
    Column("patches", Text, nullable=False),  # JSON list of the contract's patches, applied before this attempt
    Column("incident", JSON(none_as_null=True)),  # the contract's object, NULL where none was found
    Column("predicted", Text, nullable=False),  # JSON object
    Column("measured", Text, nullable=False),  # JSON object
    Column("exit_status", Integer),
    Column("set_by_user", Text),  # JSON object: setting -> whether the user had set it
    Column("error", Text),  # why it failed, in the run's own words, where its status tells less
)
# What a shared journal is delivered again is there once. A file has one writer a run, and old ones may hold anything.
Index("attempt_session", ATTEMPT.c.session, ATTEMPT.c.number).ddl_if(dialect="sqlite")
Index("attempt_once", ATTEMPT.c.session, ATTEMPT.c.number, unique=True).ddl_if(dialect="postgresql")
Index("attempt_started", ATTEMPT.c.started_at).ddl_if(dialect="postgresql")
# Alembic's own; in SQLite PRAGMA user_version says the same, which every earlier oomguard asks.
VERSION: Final = Table("alembic_version", METADATA, Column("version_num", String(32), primary_key=True))
