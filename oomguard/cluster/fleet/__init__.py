"""Summarize failures over many logs: which process wrote each log, and what failed most."""
