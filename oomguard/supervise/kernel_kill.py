"""A kill by the kernel for memory, as an incident: the log of what was killed says nothing of it."""

from __future__ import annotations

from oomguard.incident import Evidence, Incident


def killed_by_kernel(status: int, death: Incident | None) -> Incident:
    """Return the kernel's kill for memory: SIGKILL says nothing by itself, the cgroup's own count does."""
    whom, why = ("the command", f"exit status {status}") if death is None else ("its engine", death.message)
    text = f"the kernel ended {whom} for memory: {why}, and its cgroup counts one oom_kill more"
    return Incident("host_oom", text, framework="host", evidence=(Evidence(text),))
