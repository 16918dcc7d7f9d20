"""Compare two engine starts: which start of a log, what differs, and what explains it."""
