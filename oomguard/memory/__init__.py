"""The memory model: what a model, a KV cache and a run need, from configuration and from what was printed."""
