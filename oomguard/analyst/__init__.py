"""Diagnose recorded output and plan the next attempt, in the second process of a run."""
