"""vLLM: how its commands are read and changed, and what runs inside it."""
