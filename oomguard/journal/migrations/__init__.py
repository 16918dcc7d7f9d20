"""How a journal of an earlier schema becomes one of this: Alembic's folder, a revision a schema."""
