"""Allocation snapshots of torch: read without running anything in them, summed up, and taken where memory runs out."""
