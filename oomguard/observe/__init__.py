"""Turning log bytes, exceptions and exits into incidents: the only place that reads what engines print."""
