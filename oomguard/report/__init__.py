"""Show what the rooms below found: JSON contract, terminal panel, Markdown and HTML."""
