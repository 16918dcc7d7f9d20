"""Estimate a vLLM start: where the bytes of each GPU go under its settings."""
