"""Signature and rule files: load them, check them, match them against facts."""
