"""Decide for all ranks what follows an attempt: one plan for all, or no restart."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.analyst.attempt_hooks import OF_POLICY
from oomguard.analyst.side_effects import SideEffects
from oomguard.cluster.ranks.barrier import ClockOffset
from oomguard.cluster.ranks.messages import Decision, RankEnd
from oomguard.core.files import read_tables
from oomguard.core.incident import Effect, Patch
from oomguard.core.log import get_logger
from oomguard.core.settings import SETTINGS
from oomguard.remedy.policy import YOU_SET_IT, LeastValue, Policy
from oomguard.scan.engine_errors import is_of_another_rank

# Every rank must permit the common plan: a pin or minimum of one rank applies to all.


def policy_row(policy: Policy, chosen: Iterable[str] = ()) -> Mapping[str, Any]:
    """Return the policy of a rank for its message, with the settings that its user ``chose``."""
    needed = {}
    for name, need in policy.needed.items():
        needed[name] = [None if math.isinf(need.value) else need.value, need.why]
    return {
        "chosen": sorted(chosen),
        "allow": None if policy.allow is None else str(policy.allow),
        "pinned": sorted(policy.pinned),
        "minimum": dict(policy.minimum),
        "needed": needed,
    }


def policy_refusals(
    patches: Iterable[Mapping[str, Any]], ends: Mapping[int, RankEnd]
) -> dict[int, str]:
    """Return the reason for each rank that does not permit the plan."""
    from oomguard.journal.codec import patch_of

    plan = list(map(patch_of, patches))
    found = dict[int, str]()
    for rank, end in ends.items():
        policy = _policy(end.policy)
        for patch in plan:
            why = policy.holds(patch) or policy.forbids(patch) or _chosen(patch, policy, end)
            if why is not None and rank not in found:
                found[rank] = f"{_change(patch)} is not permitted: {why}"
    return found


def is_change_left(decision: Decision, ends: Mapping[int, RankEnd]) -> bool:
    """Return whether a patch is left that all ranks permit, though no rank restarts.

    For an absent rank, a patch that any other rank planned counts.
    """
    if decision.again:
        return False
    if decision.absent:
        return any(end.patches for end in ends.values())
    return bool(decision.patches) and not policy_refusals(decision.patches, ends)


def _chosen(patch: Patch, policy: Policy, end: RankEnd) -> str | None:
    """Return why a patch may not reduce a setting that the rank's user chose, or None.

    If the rank's own plan has the patch, its own failure explains that better.
    """
    is_own = any(own.get("setting") == patch.setting for own in end.patches)
    if policy.allow is not None or patch.effect != Effect.REDUCES_CAPACITY or is_own:
        return None
    if patch.setting in end.policy.get("chosen", ()):
        return YOU_SET_IT.format(patch.effect)
    return None


def _policy(row: Mapping[str, Any]) -> Policy:
    allow = row.get("allow")
    needed = {}
    for name, (value, why) in row.get("needed", {}).items():
        needed[name] = LeastValue(math.inf if value is None else value, why)
    return Policy(
        None if allow is None else Effect.parse(allow),
        frozenset(row.get("pinned", ())),
        row.get("minimum", {}),
        needed=needed,
    )


def _change(patch: Patch) -> str:

    return f"{patch.setting} {patch.change}"


# A rank sees changed files in its command's folder, but another rank's oomguard may have written
# them. Only all ranks together know the files of every oomguard, so rank 0 leaves those out.

# More files than this cannot all come from other ranks' oomguard. The limit keeps the message
# small.
_MOST_FILES: Final = 1024


def side_effects_row(seen: SideEffects) -> Mapping[str, Any]:
    """Return a rank's side effects for its message, with at most ``_MOST_FILES`` files."""
    return asdict(seen) | {
        "open_files": list(seen.open_files[:_MOST_FILES]),
        "changed_files": list(seen.changed_files[:_MOST_FILES]),
        "is_cut": max(len(seen.open_files), len(seen.changed_files)) > _MOST_FILES,
    }


def side_effects_by_rank(ends: Mapping[int, RankEnd]) -> dict[int, SideEffects]:
    """Return the side effects of each rank's command, without oomguard's own files."""
    own: set[str] = set()
    for end in ends.values():
        own.update(end.own_files)
    return {rank: _seen(end.seen, own) for rank, end in sorted(ends.items())}


def side_effect_refusals(ends: Mapping[int, RankEnd]) -> dict[int, str]:
    """Return the ranks whose side effects forbid another attempt, with the reason."""
    seen = side_effects_by_rank(ends)
    refusals = {}
    for rank, did in seen.items():
        is_asked = ends[rank].refusal is None and not ends[rank].idempotent
        if is_asked and did.would_be_repeated:
            refusals[rank] = did.refusal
    return refusals


def log_repeated_effects(ends: Mapping[int, RankEnd]) -> None:
    """Log that all ranks may repeat their side effects, and which."""
    log = get_logger()
    any_seen = False
    for rank, did in side_effects_by_rank(ends).items():
        if did.were_seen:
            any_seen = True
            log.info(f"The rank can run again, because {did.excuse()}", rank=rank)
            for event, fields in did.events():
                log.info(event, rank=rank, **fields)
    if not any_seen:
        log.info(f"All ranks can run again, because {SideEffects().excuse()}")


def _seen(row: Mapping[str, Any], own: set[str]) -> SideEffects:
    """Return the side effects of a rank; a truncated list keeps oomguard's own files."""
    if row.get("is_cut"):
        left_out = set()
    else:
        left_out = own
    opened = _without(row.get("open_files", ()), left_out)
    changed = _without(row.get("changed_files", ()), left_out)
    return SideEffects(opened, changed, row.get("requests", 0), bool(row.get("is_server", False)))


def _without(paths: Iterable[str], left_out: set[str]) -> tuple[str, ...]:
    others = []
    for path in paths:
        if path not in left_out:
            others.append(path)
    return tuple(others)


# The common plan follows the first cause. Its values suit every rank that ran out of memory.


def merge_plans(first: int, ends: Mapping[int, RankEnd]) -> tuple[Mapping[str, Any], ...]:
    """Return the patches of the first cause and those that other ranks need, as JSON objects.

    If two ranks need different numbers, the smaller one fits on both. For other values, the first
    cause decides.

    Args:
        first: the rank that failed first.
        ends: the results of the ranks.
    """
    others = []
    for rank in sorted(ends):
        if rank != first and ends[rank].how == "memory":
            others.append(rank)
    order = [first, *others]
    found: dict[str, Mapping[str, Any]] = {}
    for rank in order if ends[first].patches else ():
        for patch in ends[rank].patches:
            name = str(patch.get("setting"))
            if name not in SETTINGS:
                continue
            known = found.get(name)
            if known is None or _is_tighter(patch.get("to"), known.get("to")):
                if known is None:
                    found[name] = patch
                else:
                    found[name] = {**patch, "reason": f"rank {rank}: {patch.get('reason', '')}"}
    return tuple(found.values())


def _is_tighter(new: object, known: object) -> bool:
    if isinstance(new, bool) or isinstance(known, bool):
        return False
    if not isinstance(new, (int, float)) or not isinstance(known, (int, float)):
        return False
    return new < known


# A rank that reports an out-of-memory failed before ranks that only lost their connection; that
# order needs no clock. Among several out-of-memory ranks the earliest counts, if the difference is
# larger than the clocks' error. Otherwise the rank with the least free memory counts.

# Log lines have a resolution of one second.
PRINTED_SLACK_S: Final = 1.0
# Facts about free memory in a failure, the most informative first.
_ROOM: Final = ("kv_cache_available_bytes", "device_free_bytes", "current_free_bytes")


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Name the rank that failed first.

    ``is_order_known`` is False if several ranks failed and their clocks cannot order them.
    """

    rank: int
    is_order_known: bool


def first_cause(
    ends: Mapping[int, RankEnd], offsets: Mapping[int, ClockOffset | None]
) -> FirstFailure | None:
    """Return the rank that ran out of memory first, or None if none did.

    Args:
        ends: the results of the ranks.
        offsets: for each rank, the offset of its clock to rank 0's, or None if it is unknown.
    """
    failed = {}
    for rank, end in ends.items():
        if end.how == "memory":
            failed[rank] = end
    if not failed:
        return None
    spans = {rank: _span(end, offsets.get(rank)) for rank, end in failed.items()}
    earliest_end_s = min(latest for _, latest in spans.values())
    may_be_first = []
    for rank, (earliest, _) in spans.items():
        if earliest <= earliest_end_s:
            may_be_first.append(rank)
    rank = min(
        may_be_first,
        key=lambda rank: (not failed[rank].patches, _room(failed[rank].incident), rank),
    )
    return FirstFailure(rank, len(may_be_first) == 1)


def _span(end: RankEnd, offset: ClockOffset | None) -> tuple[float, float]:
    """Return the earliest and latest time at which a rank can have failed, on rank 0's clock."""
    if end.failed_s is None or offset is None:
        return -math.inf, math.inf
    at_s = end.failed_s + offset.offset_s
    slack_s = offset.slack_s + PRINTED_SLACK_S
    return at_s - slack_s, at_s + slack_s


def _room(incident: Mapping[str, Any] | None) -> float:
    """Return the free memory of a rank, or infinity if its failure does not report it."""
    if incident is None:
        facts = {}
    else:
        facts = incident.get("facts", {})
    for name in _ROOM:
        number = facts.get(name)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return float(number)
    return math.inf


# Messages that only show another rank's failure: lost connections, aborted collectives, timeouts.

_FILE: Final = Path(__file__).with_name("secondary.toml")
# A failure is at the end of the output.
_END_CHARS: Final = 16_384


def is_secondary(tail: str) -> bool:
    """Return whether an output ends with a message that only shows another rank's failure."""
    end = tail[-_END_CHARS:].lower()
    return is_of_another_rank(end) or any(text in end for text in _texts())


@functools.cache
def _texts() -> tuple[str, ...]:
    table = next(iter(read_tables("ranks_secondary", [_FILE]).values()))
    return tuple(map(str.lower, table["texts"]))


def decide(
    number: int,
    ends: Mapping[int, RankEnd],
    offsets: Mapping[int, ClockOffset | None],
    *,
    silent: Collection[int] = (),
    gone: Collection[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Decision:
    """Decide what follows an attempt.

    Args:
        number: the number of the attempt.
        ends: the results that the ranks reported.
        offsets: the offsets of their clocks to rank 0's.
        silent: the ranks that did not report.
        gone: the silent ranks whose process was killed.
        variables: the environment variables of every rank's next attempt.
    """
    first = first_cause(ends, offsets)
    hows = {str(rank): end.how for rank, end in sorted(ends.items())}
    stopped = {}
    for rank, end in sorted(ends.items()):
        if end.how == "stopped":
            stopped[str(rank)] = end.error
    lost = tuple(sorted(set(silent) - set(map(int, stopped))))
    killed = tuple(sorted(set(gone) & set(lost)))
    decision = Decision(number, False, silent=lost, hows=hows, gone=killed, stopped=stopped)
    if first is not None:
        decision = replace(decision, first=first.rank, is_order_known=first.is_order_known)
    if decision.absent:
        return replace(decision, why=absent_in_words(decision))
    if first is None:
        return replace(decision, why="" if _all_ran(ends) else "no rank ran out of memory")
    decision = replace(decision, patches=merge_plans(first.rank, ends))
    refusing = list(_refusing(ends, decision))
    if refusing:
        is_exhausted = bool(decision.patches) and all(
            refusal in OF_POLICY for _, refusal in refusing
        )
        return replace(
            decision, why=f"rank {refusing[0][0]}: {refusing[0][1]}", is_exhausted=is_exhausted
        )
    if not decision.patches:
        return replace(decision, why="nothing more to change by itself")
    return replace(decision, again=True, variables=variables or {})


def _refusing(ends: Mapping[int, RankEnd], decision: Decision) -> Iterator[tuple[int, str]]:
    """Yield each rank that forbids a restart, with the reason; its policy comes first."""
    repeated = side_effect_refusals(ends)
    for reasons in (policy_refusals(decision.patches, ends), repeated):
        yield from sorted(reasons.items())
    for rank, end in sorted(ends.items()):
        if end.refusal is not None:
            yield rank, end.refusal


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return rank numbers as text, such as ``rank 2`` or ``ranks 0, 1 and 3``."""
    named = list(map(str, sorted(ranks)))
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def absent_in_words(decision: Decision) -> str:
    """Return as text which ranks were stopped, and which did not report their result."""
    quiet = set(decision.silent) - set(decision.gone)
    if len(decision.gone) == 1:
        killed = "was killed"
    else:
        killed = "were killed"
    by_signal: dict[str, list[int]] = {}
    for rank, how in decision.stopped.items():
        by_signal.setdefault(how, []).append(int(rank))
    parts = [f"a signal ({how}) ended {ranks_in_words(ranks)}" for how, ranks in by_signal.items()]
    parts += [f"{ranks_in_words(decision.gone)} {killed}"] if decision.gone else []
    parts += (
        [f"{ranks_in_words(quiet)} {'is' if len(quiet) == 1 else 'are'} silent"] if quiet else []
    )
    return "; ".join(parts)


def _all_ran(ends: Mapping[int, RankEnd]) -> bool:
    return all(end.how == "ran" for end in ends.values())
