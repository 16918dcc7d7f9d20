"""A server that runs for weeks: whether it still works, and who is told how it does."""
