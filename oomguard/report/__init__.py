"""Showing a diagnosis: JSON contract, terminal panel, Markdown and HTML."""
