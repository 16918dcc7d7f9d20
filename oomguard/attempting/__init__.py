"""One state machine for every retry."""
