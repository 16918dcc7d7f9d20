"""Work with Kubernetes and SLURM: exit status by cause, and a job that is requeued with its
changes.
"""
