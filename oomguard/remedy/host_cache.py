"""The host's part of a KV cache (SGLang's HiCache): sized to what the host has free, less what the engine keeps of it.

A pool is refused where it asks for more than is free less 10 GiB: sglang/srt/mem_cache/memory_pool_host.py, 0.4.4 to 0.5.23. Until
0.4.9 the message gave what is free without that.
"""

from __future__ import annotations

from typing import Final

from oomguard.facts import GIB
from oomguard.incident import Incident
from oomguard.remedy.solution import Solution

# The unit of hicache_size.
_GB: Final = 10**9
_KEPT_BYTES: Final = 10 * GIB
# The host's other programs take some more until the next start.
_MARGIN_RATIO: Final = 0.05


def host_cache_within_free(incident: Incident) -> Solution:
    """Give each rank's host pool its part of what is free; ranks pin theirs at the same time."""
    figures = _figures(incident)
    if isinstance(figures, Solution):
        return figures
    wanted, usable, share = figures
    size_gb = int(usable * (1 - _MARGIN_RATIO) / _GB)
    if size_gb < 1:
        return Solution(None, f"{usable / _GB:.2f} GB of the host are left{share}: too little for a host cache")
    return Solution(size_gb, _reason(wanted, usable, share), round(wanted - size_gb * _GB))


def host_ratio_within_free(incident: Incident) -> Solution:
    """Lower the multiple of the device's pool so that the host's part fits in what is free: ratio x free / asked for."""
    ratio, figures = incident.number("hicache_ratio"), _figures(incident)
    if isinstance(figures, Solution):
        return figures
    wanted, usable, share = figures
    if ratio is None:
        return Solution(None, "takes less of the host", unknown=("hicache_ratio: not printed",))
    value = int(100 * ratio * usable * (1 - _MARGIN_RATIO) / wanted) / 100
    if value <= 0:
        return Solution(None, f"{usable / _GB:.2f} GB of the host are left{share}: too little for a host cache")
    return Solution(value, _reason(wanted, usable, share), round(wanted * (1 - value / ratio)))


def _figures(incident: Incident) -> tuple[float, float, str] | Solution:
    """Return what was asked for, what a rank may take and how that was shared, or what is missing of it."""
    wanted, free = incident.number("tried_bytes"), incident.number("host_available_bytes")
    if not wanted or free is None:
        missing = "what the pool asks for and what the host has free: not printed"
        return Solution(None, f"takes less of the host; by how much is not known ({missing})", unknown=(missing,))
    ranks = int(incident.number("tensor_parallel_size") or 1)
    usable = free - _KEPT_BYTES if free >= wanted else free
    return wanted, max(0.0, usable / ranks), f" for each of {ranks} ranks" if ranks > 1 else ""


def _reason(wanted: float, usable: float, share: str) -> str:
    return f"{usable / _GB:.2f} GB of the host are left{share}, and {wanted / _GB:.2f} GB were asked for"
