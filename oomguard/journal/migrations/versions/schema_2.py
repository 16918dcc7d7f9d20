"""One row a run, with a number and what it was; of the attempts that are there it is told from what they hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"

_RUNS_OF_ATTEMPTS = """
INSERT INTO run (session, original, engine, engine_version)
SELECT a.session, a.command, json_extract(f.incident, '$.framework'), json_extract(f.incident, '$.framework_version')
FROM (SELECT session, min(id) AS first, max(CASE WHEN incident IS NOT NULL THEN id END) AS failed FROM attempt GROUP BY session) s
JOIN attempt a ON a.id = s.first LEFT JOIN attempt f ON f.id = s.failed
ORDER BY s.first"""
# An oomguard of schema 1 that runs since before the migration goes on writing attempts: the trigger gives them a run.
_LATE_RUNS = """
CREATE TRIGGER attempt_of_no_run AFTER INSERT ON attempt
WHEN NOT EXISTS (SELECT 1 FROM run WHERE session = NEW.session)
BEGIN INSERT INTO run (session, original) VALUES (NEW.session, NEW.command); END"""


def upgrade() -> None:
    """Make the table of runs, and fill it in a file that is older."""
    op.create_table(
        "run",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("session", sa.Text, nullable=False, unique=True),
        sa.Column("original", sa.Text, nullable=False),
        sa.Column("folder", sa.Text),
        sa.Column("files", sa.Text),
        sa.Column("engine", sa.Text),
        sa.Column("engine_version", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("device", sa.Text),
        sa.Column("forgotten", sa.Integer, nullable=False, server_default=sa.text("0")),
        sqlite_autoincrement=True,
    )
    op.add_column("attempt", sa.Column("set_by_user", sa.Text))
    if op.get_bind().dialect.name == "sqlite":  # of PostgreSQL there is none that is older
        op.create_index("attempt_session", "attempt", ["session", "number"])
        op.execute(_RUNS_OF_ATTEMPTS)
        op.execute(_LATE_RUNS)
