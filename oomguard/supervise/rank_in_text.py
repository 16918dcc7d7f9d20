"""Which rank a failure is of, where the line itself names no process: by srun's labels, or by torchrun's table of failures.

torchrun's table repeats what a worker left in its error file (TORCHELASTIC_ERROR_FILE). It is evidence of what that worker said; which
worker it calls the root cause is the one whose end the agent saw first, which is not taken over what is known of memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Final

from oomguard.incident import Diagnosis, Incident
from oomguard.observe.rank_labels import with_label

_LABELS: Final = frozenset({"-l", "--label"})
# torch/distributed/elastic/multiprocessing/errors/__init__.py: an entry of the table, and the one line of it that names the rank.
_ENTRY: Final = re.compile(r"^\s*\[\d+\]:\s*$", re.MULTILINE)
_RANK: Final = re.compile(r"^\s+rank\s+: (\d+) \(local_rank: \d+\)", re.MULTILINE)
_TABLE: Final = "Root Cause (first observed failure):"


def with_ranks(diagnosis: Diagnosis, tail: str, argv: Sequence[str]) -> Diagnosis:
    """Return a diagnosis whose incidents name their rank as process where it is told; by torchrun's table where nothing else names one.

    Args:
        diagnosis: of a command's output.
        tail: the end of the output.
        argv: the command.
    """
    names = [PurePath(word).name for word in argv]
    is_labelled = "srun" in names and bool(_LABELS & set(names))
    found = tuple(_named(incident, tail, is_labelled=is_labelled) for incident in diagnosis.incidents)
    return replace(diagnosis, incidents=found)


def _named(incident: Incident, tail: str, *, is_labelled: bool) -> Incident:
    incident = with_label(incident, is_labelled=is_labelled)
    if incident.location.process is not None or not incident.evidence:
        return incident
    rank = _in_table(incident.evidence[0].text.strip(), tail)
    return incident if rank is None else replace(incident, location=replace(incident.location, process=f"rank {rank}"))


def _in_table(text: str, tail: str) -> str | None:
    at = tail.rfind(text) if text and _TABLE in tail else -1
    begins = [entry.start() for entry in _ENTRY.finditer(tail, 0, at)] if at > 0 else []
    rank = _RANK.search(tail, begins[-1], at) if begins else None
    return None if rank is None else rank[1]
