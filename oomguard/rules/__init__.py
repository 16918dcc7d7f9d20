"""Signature and rule files: loading, checking, and matching them against facts."""
