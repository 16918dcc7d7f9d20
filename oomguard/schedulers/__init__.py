"""What Kubernetes and SLURM act on: an exit status by cause, a job that goes back to its queue with its changes."""
