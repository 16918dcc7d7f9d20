"""Watch a server that runs for weeks: health, probes, systemd, termination messages."""
