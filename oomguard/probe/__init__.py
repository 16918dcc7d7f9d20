"""Read what this machine reports: NVML, cgroups, /proc, torch counters, and variables."""
