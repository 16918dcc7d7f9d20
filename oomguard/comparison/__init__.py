"""Compare two engine starts: select the start of each log, list and explain changes."""
