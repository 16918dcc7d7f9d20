"""Frozen records, facts, settings and their spellings, errors, logging: what every other package
may import.
"""
