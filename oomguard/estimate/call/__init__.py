"""Estimate a call of transformers' ``generate``: bytes per row and the peak of the call."""
