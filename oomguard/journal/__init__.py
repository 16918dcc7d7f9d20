"""Record every attempt of ``oomguard run``."""
