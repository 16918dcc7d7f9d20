"""Estimate memory: what a model, a KV cache, an engine start and a generate call need."""
