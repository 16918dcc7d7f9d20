"""Adapters: how a patch reaches an engine, by flag, by environment, or inside the process."""
