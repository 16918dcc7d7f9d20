"""The user's own functions in a part of a call: what each is shown there, and which keep the call whole.

A processor or a criterion of the user's own may look at other rows, or keep a state that the call which failed has changed: with one
the call is not run in parts. A function of allowed prefixes gets each row's place in the whole call.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Mapping
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
_STATE: Final = "changes as it is called, so that parts would find it otherwise than the whole call"


class WholeView:
    """What the user's own functions of one call are shown while its parts run.

    Attributes:
        problem: why the parts cannot be taken for the whole call; None as long as they can.
    """

    def __init__(self) -> None:
        self.problem: str | None = None

    def part(self, arguments: Mapping[str, Any], start: int, groups: int) -> dict[str, Any]:
        """Return these arguments as rows from ``start`` on get them; ``groups`` of sentences are asked about for each row."""
        given = arguments.get(PREFIXES)
        return {} if given is None else {PREFIXES: _AtPlace(given, self, start * groups)}

    def check(self, given: Any, before: bytes | None) -> None:
        """Note where a function's state is not what it was."""
        if before is None or state_of(given) != before:
            self.problem = self.problem or f"{_name(given)} {_STATE}"


class _AtPlace:
    """Tokens allowed after a prefix, by the row's place in the whole call."""

    def __init__(self, given: Any, whole: WholeView, start: int) -> None:
        self._given, self._whole, self._first = given, whole, start
        self._before = state_of(given)

    def __call__(self, batch_id: int, sentence: Any) -> Any:
        found = self._given(batch_id + self._first, sentence)
        self._whole.check(self._given, self._before)
        return found


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
    """Return why a call with the user's own functions has to run whole; None where there are none that forbid parts."""
    for name in (PROCESSORS, CRITERIA):
        for each in arguments.get(name) or ():
            if not _is_library(each) or type(each).__name__ in _OF_THE_BATCH:
                return f"the argument {name} belongs to the whole batch: {_name(each)} may look at other rows, or keep a state"
    given = arguments.get(PREFIXES)
    if given is not None and state_of(given) is None:
        return f"the argument {PREFIXES} belongs to the whole batch: what {_name(given)} holds cannot be read"
    return None


def _is_library(given: Any) -> bool:
    """Return whether transformers has made it: what looks at a row alone, whichever it is, unless it is one of those named."""
    return type(given).__module__.startswith("transformers.generation")


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))
