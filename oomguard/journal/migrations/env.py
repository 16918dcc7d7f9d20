"""What Alembic runs: the revisions that are missing, in the transaction of who asks for them (schema.py)."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
