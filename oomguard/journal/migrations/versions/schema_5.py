"""Who ran it and where, for a journal that several share; in a shared one each attempt stands once, whoever delivers it again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Add them; NULL where they were not recorded."""
    op.add_column("run", sa.Column("who", sa.Text))
    op.add_column("run", sa.Column("host", sa.Text))
    op.add_column("run", sa.Column("clock_offset_s", sa.Double))
    if op.get_bind().dialect.name != "sqlite":
        op.create_index("attempt_once", "attempt", ["session", "number"], unique=True)
        op.create_index("attempt_started", "attempt", ["started_at"])
