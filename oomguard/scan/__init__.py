"""Read log bytes, exceptions and exits, and find memory failures with their facts."""
