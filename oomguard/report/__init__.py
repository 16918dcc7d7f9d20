"""Show diagnoses, plans and runs as JSON, terminal panels, Markdown and HTML."""
