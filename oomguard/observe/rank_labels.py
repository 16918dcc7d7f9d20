"""Which rank a line is of, by the number that ``srun --label`` puts before each: ``3: RuntimeError: …``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from oomguard.incident import Diagnosis, Incident

_LABEL: Final = re.compile(r" {0,3}(\d{1,4}): (?=\S)")
# What a job's script has its output in (sbatch(1)); there a number before a line is a label.
_JOB_OUTPUT: Final = re.compile(r"(?:^|/)slurm-\d+[^/]*$")
_RANK: Final = re.compile(r"rank ?\d+")


def with_labels(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a log with the rank in the process of each incident whose lines are labelled."""
    is_labelled = _JOB_OUTPUT.search(diagnosis.source) is not None
    return replace(diagnosis, incidents=tuple(with_label(one, is_labelled=is_labelled) for one in diagnosis.incidents))


def with_label(incident: Incident, *, is_labelled: bool) -> Incident:
    """Return an incident whose process says the rank that its lines are labelled with; as it is where they are not.

    Args:
        incident: as it was found.
        is_labelled: whether the lines are known to have labels. Else two of the incident's own have to have the same: a
            line's number, as ``grep -n`` puts it there, does not come twice.
    """
    named = incident.location.process
    if not incident.evidence or (named is not None and _RANK.match(named)):
        return incident
    own, *others = incident.evidence
    label = _LABEL.match(own.text)
    if label is None or not (is_labelled or any(_is_of(label[1], other.text) for other in others if other != own)):
        return incident
    process = f"rank {label[1]}" if named is None else f"rank {label[1]}: {named}"
    return replace(incident, location=replace(incident.location, process=process))


def _is_of(rank: str, text: str) -> bool:
    label = _LABEL.match(text)
    return label is not None and label[1] == rank
