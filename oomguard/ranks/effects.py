"""What the ranks' commands did to the outside world, and whether all may do it again.

A rank sees that a file changed in the folder where its command works, and another rank's oomguard may have written it. Only all ranks
together know which files are those of an oomguard, so the one that decides leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from oomguard.log import get_logger
from oomguard.ranks.documents import RankEnd
from oomguard.supervise.side_effects import SideEffects

# A rank that saw more than this is no case of a few files of other ranks: its document stays small.
_MOST_FILES: Final = 1024


def seen_row(seen: SideEffects) -> Mapping[str, Any]:
    """Return what was seen as a rank's document has it; of very many files the first ones."""
    return asdict(seen) | {
        "open_files": list(seen.open_files[:_MOST_FILES]),
        "changed_files": list(seen.changed_files[:_MOST_FILES]),
        "is_cut": max(len(seen.open_files), len(seen.changed_files)) > _MOST_FILES,
    }


def seen_by_all(ends: Mapping[int, RankEnd]) -> dict[int, SideEffects]:
    """Return what each rank's command did, without the files that the oomguard of any rank wrote."""
    own = {path for end in ends.values() for path in end.own_files}
    return {rank: _seen(end.seen, own) for rank, end in sorted(ends.items())}


def why_not_repeated(ends: Mapping[int, RankEnd]) -> dict[int, str]:
    """Return why ranks must not do again what they did, by rank; of one that cannot run again in any case that counts."""
    seen = seen_by_all(ends)
    asked = {rank: did for rank, did in seen.items() if ends[rank].refusal is None and not ends[rank].idempotent}
    return {rank: did.refusal for rank, did in asked.items() if did.would_be_repeated}


def tell_repeated(ends: Mapping[int, RankEnd]) -> None:
    """Tell that all may run again and what each of them repeats by it."""
    log, any_seen = get_logger(), False
    for rank, did in seen_by_all(ends).items():
        if did.were_seen:
            any_seen = True
            log.info(f"may run again from the beginning; {did.excuse()}", rank=rank)
            for event, fields in did.told():
                log.info(event, rank=rank, **fields)
    if not any_seen:
        log.info(f"may run again from the beginning; {SideEffects().excuse()}")


def _seen(row: Mapping[str, Any], own: set[str]) -> SideEffects:
    """Return what was seen; of files that were too many to tell, own ones are not told apart."""
    left_out = set() if row.get("is_cut") else own
    opened, changed = (
        tuple(path for path in row.get(name, ()) if path not in left_out) for name in ("open_files", "changed_files")
    )
    return SideEffects(opened, changed, row.get("requests", 0), bool(row.get("is_server", False)))
