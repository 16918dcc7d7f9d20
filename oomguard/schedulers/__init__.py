"""What Kubernetes and SLURM act on: probes that see a hang, an exit status by cause, a job that goes back to its queue with its changes."""
