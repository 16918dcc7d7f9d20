"""Turn log bytes, exceptions and exits into incidents: the only room that reads what engines print."""
