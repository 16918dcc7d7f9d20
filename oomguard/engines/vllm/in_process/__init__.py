"""Start vLLM in this process: read its processes' logs, clean up failed starts, start again."""
