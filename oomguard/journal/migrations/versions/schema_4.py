"""Why an attempt failed where its exit status tells less."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Add it; NULL: as status and incident tell."""
    op.add_column("attempt", sa.Column("error", sa.Text))
