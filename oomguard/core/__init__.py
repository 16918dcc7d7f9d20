"""Define records, facts, settings, errors and logging, which every other package may import."""
