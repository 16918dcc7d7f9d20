"""A call of transformers' ``generate``: what its rows need."""
