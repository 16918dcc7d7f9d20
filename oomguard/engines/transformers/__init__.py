"""Hugging Face transformers: which calls are watched, and how they are split."""
