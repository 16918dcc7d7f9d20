"""Coordinate the ranks of one job: find each other, name the first cause, restart all or none."""
