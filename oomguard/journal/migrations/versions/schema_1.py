"""One row an attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make the table of attempts."""
    op.create_table(
        "attempt",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("session", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("command", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("patches", sa.Text, nullable=False),
        sa.Column("incident", sa.JSON),
        sa.Column("predicted", sa.Text, nullable=False),
        sa.Column("measured", sa.Text, nullable=False),
        sa.Column("exit_status", sa.Integer),
        if_not_exists=True,
    )
