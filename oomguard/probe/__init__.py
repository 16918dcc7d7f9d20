"""What this machine reports of itself: NVML, cgroups, /proc, PyTorch counters, environment
variables.
"""
