"""Whether masking hid secrets alone of a command."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Add it; NULL where it was not recorded."""
    op.add_column("run", sa.Column("hides_secrets_alone", sa.Integer))
