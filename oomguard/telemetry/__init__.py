"""Live figures: what runs and guarded calls went through, counted for Prometheus and told as
OpenTelemetry spans.
"""
