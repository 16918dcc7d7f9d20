"""Running the user's command: streams passed through unchanged, signals forwarded, the whole tree ended."""
