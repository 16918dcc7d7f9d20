"""A start of vLLM: where the bytes of each GPU go under its settings."""
