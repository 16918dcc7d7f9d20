"""Measure memory: before a call, at its peak, and after it, for each device and the host."""
