"""Choose options of torch's allocator, and their environment variable, by torch's version."""

from __future__ import annotations

import re
from typing import Final

from oomguard.core.incident import Incident
from oomguard.remedy.solution import Solution

_EXPANDABLE: Final = "expandable_segments:True"
# The option of torch 1.10 to 2.0 against fragmentation: larger blocks are not split.
_WHOLE_BLOCKS: Final = "max_split_size_mb:128"
_HAS_EXPANDABLE: Final = (2, 1)
_HAS_PLAIN_NAME: Final = (2, 10)
# Messages of torch before 2.1. torch_npu still prints them, but has expandable segments.
_OLD_WORDING: Final = re.compile(r"total capacity;|already allocated")
# torch 2.10 still reads the CUDA name, so it works with every version.
_NAMES: Final = {"hip_oom": "PYTORCH_HIP_ALLOC_CONF", "npu_oom": "PYTORCH_NPU_ALLOC_CONF"}
_ANY_VERSION: Final = "PYTORCH_CUDA_ALLOC_CONF"
_FROM_2_10: Final = "PYTORCH_ALLOC_CONF"


def options_for_pieces(incident: Incident) -> Solution:
    """Make fragmented free memory usable: expandable segments, or whole blocks before 2.1."""
    version = _version(incident)
    if version:
        is_old = version < _HAS_EXPANDABLE
    else:
        is_old = incident.kind != "npu_oom" and _words_are_old(incident)
    if is_old:
        return Solution(
            _WHOLE_BLOCKS,
            "larger blocks are not split; this torch is too old for expandable segments (2.1)",
        )
    return Solution(_EXPANDABLE, "expandable segments join the free fragments")


def allocator_variable(incident: Incident) -> str:
    """Return the environment variable that torch reads: as its message names it, or by version."""
    named = incident.facts.get("allocator_variable")
    if named is not None:
        return str(named.value)
    version = _version(incident)
    if version and version >= _HAS_PLAIN_NAME and incident.kind != "npu_oom":
        return _FROM_2_10
    return _NAMES.get(incident.kind, _ANY_VERSION)


def _version(incident: Incident) -> tuple[int, int] | None:
    fact = incident.facts.get("torch_version")
    if fact is not None:
        found = re.match(r"(\d+)\.(\d+)", str(fact.value))
    else:
        found = None
    if found is None:
        return None
    return (int(found.group(1)), int(found.group(2)))


def _words_are_old(incident: Incident) -> bool:
    return _OLD_WORDING.search(incident.message) is not None
