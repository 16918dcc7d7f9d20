"""Export live figures of runs and guarded calls as Prometheus metrics and OpenTelemetry spans."""
