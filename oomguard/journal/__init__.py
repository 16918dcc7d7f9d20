"""The record of every attempt of ``oomguard run``."""
