"""Seeing: what memory was before, at most during, and after, by whom."""
