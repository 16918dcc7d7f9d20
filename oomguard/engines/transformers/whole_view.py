"""Processors and criteria of the user's own in a part: they see as many rows as in the whole call, each in its place.

What they say must hang on a row and its place alone: the other places are filled with rows that are none of the call, and where
another filling, or a row by itself, gives another answer, the call is not one to be run in parts. So it is where their state
changes as they are called.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

PROCESSORS: Final = "logits_processor"
CRITERIA: Final = "stopping_criteria"
PREFIXES: Final = "prefix_allowed_tokens_fn"
NAMES: Final = (PROCESSORS, CRITERIA, PREFIXES)
# Of transformers' own those that count rows, hold a state, or look at a clock.
_OF_THE_BATCH: Final = frozenset(
    {
        "PrefixConstrainedLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "WhisperNoSpeechDetection",
        "MaxTimeCriteria",
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "ConfidenceCriteria",
    }
)
_MOST_STATE_BYTES: Final = 64 * 2**10
_SEES: Final = 2  # arguments of a processor: tokens and scores
_STATE: Final = "changes as it is called, so that parts would find it otherwise than the whole call"
_OTHERS: Final = "looks at other rows of the batch"


class WholeView:
    """What the user's own functions of one call are shown while its parts run.

    Attributes:
        rows: rows of the whole call.
        problem: why the parts cannot be taken for the whole call; None as long as they can.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.problem: str | None = None

    def part(self, arguments: Mapping[str, Any], start: int, stop: int, groups: int) -> dict[str, Any]:
        """Return these arguments as rows ``start`` to ``stop`` get them; ``groups`` of sentences are asked about for each row."""
        changed: dict[str, Any] = {}
        for name, seen, view in ((PROCESSORS, _Processor, _scores), (CRITERIA, _Criterion, _ends)):
            if arguments.get(name):
                own = [each if _is_library(each) else seen(each, view, self, start, stop) for each in arguments[name]]
                changed[name] = type(arguments[name])(own)
        if arguments.get(PREFIXES) is not None:
            changed[PREFIXES] = _AtPlace(arguments[PREFIXES], self, start * groups)
        return changed

    def fill(self, own: Any, start: int, stop: int, *, shift: int) -> Any:
        """Return ``own``, rows ``start`` to ``stop``, in their places among all; ``shift`` makes the other places another filling."""
        each = own.shape[0] // (stop - start)
        number = self.rows * each
        filled = own.roll(shift, dims=-1).repeat(-(-number // own.shape[0]), *[1] * (own.dim() - 1))[:number]
        filled[start * each : stop * each] = own
        return filled

    def check(self, given: Any, before: bytes | None) -> None:
        """Note where a function's state is not what it was."""
        if before is None or state_of(given) != before:
            self.problem = self.problem or f"{_name(given)} {_STATE}"

    def refuse(self, given: Any) -> None:
        """Note a function whose answer for a row hangs on others."""
        self.problem = self.problem or f"{_name(given)} {_OTHERS}"


class _Seen:
    """A processor or a criterion, called with all rows."""

    def __init__(self, given: Any, view: Callable[..., Any], whole: WholeView, start: int, stop: int) -> None:
        self._given, self._view, self._whole, self._start, self._stop = given, view, whole, start, stop
        self._before = state_of(given)

    def seen(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """Return what it says of a part's rows."""
        own = (self._given, self._whole, self._start, self._stop)
        found, stands_alone = self._view(*own, input_ids, scores, **options)
        self._whole.check(self._given, self._before)
        if not stands_alone:
            self._whole.refuse(self._given)
        return found


class _Processor(_Seen):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self.seen(input_ids, scores)


class _Criterion(_Seen):
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return self.seen(input_ids, scores, **options)


class _AtPlace:
    """Tokens allowed after a prefix, by the row's place in the whole call."""

    def __init__(self, given: Any, whole: WholeView, start: int) -> None:
        self._given, self._whole, self._first = given, whole, start
        self._before = state_of(given)

    def __call__(self, batch_id: int, sentence: Any) -> Any:
        found = self._given(batch_id + self._first, sentence)
        self._whole.check(self._given, self._before)
        return found


def _scores(
    given: Any, whole: WholeView, start: int, stop: int, ids: Any, scores: Any, **options: Any
) -> tuple[Any, bool]:
    """Return a processor\'s scores for the rows of a part, and whether they are the same among other rows."""
    each, found = ids.shape[0] // (stop - start), []
    for shift in (0, 1):
        shown = whole.fill(ids, start, stop, shift=shift), whole.fill(scores, start, stop, shift=shift)
        found.append(given(*shown, **options)[start * each : stop * each])
    return found[0].clone(), bool((found[0] == found[1]).all())


def _ends(
    given: Any, whole: WholeView, start: int, stop: int, ids: Any, scores: Any, **options: Any
) -> tuple[Any, bool]:
    """Return which rows of a part a criterion ends, and whether it ends the same ones each by itself."""
    import torch

    each = ids.shape[0] // (stop - start)
    first, number = start * each, whole.rows * each
    among = _answer(given(whole.fill(ids, start, stop, shift=1), scores, **options), number, ids)[first : stop * each]
    alone = [
        _answer(given(row.expand(number, -1).contiguous(), scores, **options), number, ids)[first + place]
        for place, row in enumerate(ids)
    ]
    return among.clone(), bool((torch.stack(alone) == among).all())


def _answer(ended: Any, rows: int, ids: Any) -> Any:
    """Return a criterion's answer for each row; one for all of them stands for each."""
    import torch

    if isinstance(ended, torch.Tensor) and ended.dim() == 1:
        return ended
    return torch.full((rows,), bool(ended), device=ids.device)


class _Little(io.BytesIO):
    """Takes no more than a function of the user's may hold: it is read at every step."""

    def write(self, data: Any) -> int:
        if self.tell() + len(memoryview(data)) > _MOST_STATE_BYTES:
            raise OverflowError
        return super().write(data)


def state_of(given: Any) -> bytes | None:
    """Return what a function of the user's holds; None where that cannot be read."""
    try:
        out = _Little()
        pickle.Pickler(out).dump(_held(given))
        return out.getvalue()
    except Exception:  # noqa: BLE001 - a user's own object: anything, and all means "not known"
        return None


def _held(given: Any) -> list[Any]:
    if isinstance(given, types.MethodType):
        return [_held(given.__self__), _held(given.__func__)]
    if isinstance(given, functools.partial):
        return [_held(given.func), given.args, given.keywords]
    if isinstance(given, types.FunctionType):
        return [vars(given), [cell.cell_contents for cell in given.__closure__ or ()], given.__defaults__]
    return [vars(given)]  # a TypeError where it keeps what it holds elsewhere


def why_not_viewed(arguments: Mapping[str, Any]) -> str | None:
    """Return why the user's own functions cannot be shown a part; None where they can, or there are none."""
    for name in NAMES:
        given = arguments.get(name)
        for each in [given] if name == PREFIXES else given or ():
            if each is None or (_is_library(each) and type(each).__name__ not in _OF_THE_BATCH):
                continue
            if _is_library(each) or (name == PROCESSORS and len(inspect.signature(each.__call__).parameters) != _SEES):
                return f"the argument {name} belongs to the whole batch: {_name(each)} counts its rows, or more"
            if state_of(each) is None:
                return f"the argument {name} belongs to the whole batch: what {_name(each)} holds cannot be read"
    return None


def _is_library(given: Any) -> bool:
    """Return whether transformers has made it: what looks at a row alone, whichever it is, unless it is one of those named."""
    return type(given).__module__.startswith("transformers.generation")


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))
