"""Follows the rows of a call under fake tensors: does one row depend on another."""
