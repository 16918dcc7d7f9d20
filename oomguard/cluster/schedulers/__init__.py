"""Support Kubernetes and SLURM: an exit status by cause, and jobs requeued with their changes."""
