"""The user's own functions in a part of a call: what each is shown there, and which keep the call whole.

A function of allowed prefixes gets each row's place in the whole call, processors and criteria the whole batch (own_steps.py). One that
keeps a state was changed by the call that failed: with it the call is not run in parts.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import types
from collections.abc import Mapping
from typing import Any, Final, Protocol

from oomguard.engines.transformers.own_steps import CriterionAtPlace, OwnSteps, Place, ProcessorAtPlace
from oomguard.facts import format_gib
from oomguard.observe import torch_memory

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
_MOST_SHOWN_BYTES: Final = 2**30
_OF_A_PROCESSOR: Final = 2  # tokens and scores; transformers asks for others by name
_STATE: Final = "changes as it is called, so that parts would find it otherwise than the whole call"


class WholeView:
    """What the user's own functions of one call are shown while its parts run.

    Attributes:
        problem: why the parts cannot be taken for the whole call; None as long as they can.
        steps: what processors and criteria were shown.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.steps = OwnSteps(self.check)
        self._place = Place(0, 1, 1)

    def part(
        self, arguments: Mapping[str, Any], rows: tuple[int, int, int], several: int, *, pads: bool
    ) -> dict[str, Any]:
        """Return these arguments as a part gets them.

        Args:
            arguments: those of the whole call.
            rows: the part's first row, the one behind its last, and all rows.
            several: the sentences that are made of a row.
            pads: whether a row that has ended is padded until the others have.
        """
        start, stop, total = (several * row for row in rows)
        self._place = Place(start, stop, total)
        self.steps.forget(start)
        given = arguments.get(PREFIXES)
        changed: dict[str, Any] = {} if given is None else {PREFIXES: _AtPlace(given, self, start)}
        for name in (PROCESSORS, CRITERIA):
            if (functions := arguments.get(name)) and own_functions(functions):
                numbers = {id(each): number for number, each in enumerate(own_functions(functions))}
                wrapped = (
                    each if _is_library(each) else self._shown(name, each, numbers[id(each)], pads)
                    for each in functions
                )
                changed[name] = type(functions)(wrapped)
        return changed

    def _shown(self, name: str, given: Any, number: int, pads: bool) -> Any:
        state = state_of(given)
        if name == PROCESSORS:
            return ProcessorAtPlace(given, state, self.steps, number, self._place)
        return CriterionAtPlace(given, state, self.steps, number, self._place, is_mute=not pads)

    def take(self, arguments: Mapping[str, Any], part: Any, pad: int | None, ends: frozenset[int]) -> str | None:
        """Take the tokens of a part; with the last one return why they cannot stand for the whole call's, None where they can."""
        processors, criteria = (own_functions(arguments.get(name)) for name in (PROCESSORS, CRITERIA))
        if not processors and not criteria:
            return None
        with torch_memory.on_host():
            self.steps.tokens[self._place.first] = part.to("cpu", copy=True)
        if self._place.last < self._place.total:
            return None
        try:
            return self.steps.judge(processors, criteria, self._place.total, pad, ends, part.device)
        except Exception as error:  # noqa: BLE001 - of a function of the user's, or no room for what it is shown
            return f"asked about all rows, {_name((processors or criteria)[0])} raised {type(error).__name__}: {error}"

    def finished(self, result: Any) -> Any:
        """Return the tokens of the whole call: those put together, unless criteria tell where its rows end."""
        tokens = self.steps.result
        return result if tokens is None else torch_memory.from_host(tokens.to(result.dtype), result.device)

    def unsettled(self, arguments: Mapping[str, Any]) -> str | None:
        """Return which function has not been asked about all rows; None where none is left to ask."""
        own = [each for name in (PROCESSORS, CRITERIA) for each in own_functions(arguments.get(name))]
        if not own or self.steps.result is not None:
            return None
        return f"{_name(own[0])} has not been asked about all of them, and may look at other rows"

    def refuse(self, why: str) -> None:
        """Note why parts, or another call, would find something else than the call that failed."""
        self.problem = self.problem or why

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


def own_functions(given: Any) -> list[Any]:
    """Return the processors or criteria among these that are the user's own."""
    return [each for each in given or () if not _is_library(each)]


def why_not_viewed(arguments: Mapping[str, Any]) -> str | None:
    """Return why a call's functions cannot be shown all rows at each step; None where they can."""
    for name in (PROCESSORS, CRITERIA):
        for each in arguments.get(name) or ():
            if type(each).__name__ in _OF_THE_BATCH and _is_library(each):
                return f"the argument {name} belongs to the whole batch: {_name(each)} may look at other rows, or keep a state"
            if not _is_library(each) and state_of(each) is None:
                return f"the argument {name} belongs to the whole batch: what {_name(each)} holds cannot be read"
            if (
                name == PROCESSORS
                and not _is_library(each)
                and len(inspect.signature(each).parameters) != _OF_A_PROCESSOR
            ):
                return (
                    f"the argument {name} belongs to the whole batch: {_name(each)} takes more than tokens and scores"
                )
    given = arguments.get(PREFIXES)
    if given is not None and state_of(given) is None:
        return f"the argument {PREFIXES} belongs to the whole batch: what {_name(given)} holds cannot be read"
    return None


def why_state_may_have_changed(arguments: Mapping[str, Any]) -> str | None:
    """Return which function of the user's may not be called by a call that is made once more, None without one."""
    own = [each for name in (PROCESSORS, CRITERIA) for each in own_functions(arguments.get(name))]
    return f"{_name(own[0])} may keep a state that the call which failed has changed" if own else None


class _Call(Protocol):
    """What is asked of a call of ``generate``."""

    @property
    def model(self) -> Any: ...
    @property
    def rows(self) -> int: ...
    @property
    def max_new_tokens(self) -> int | None: ...
    @property
    def pad_value(self) -> int | None: ...
    @property
    def weigh(self) -> Any: ...
    def option(self, name: str) -> Any: ...


def why_not_shown(arguments: Mapping[str, Any], call: _Call) -> str | None:
    """Return why the user's own processors and criteria cannot be asked about all rows in the end, None where they can."""
    processors, criteria = (own_functions(arguments.get(name)) for name in (PROCESSORS, CRITERIA))
    if not processors and not criteria:
        return None
    owner = f"{_name((processors or criteria)[0])} belongs to the whole batch"
    if (call.option("num_beams") or 1) > 1:
        return f"{owner}: beams take the place of one another"
    if call.weigh is not None or call.option("prompt_lookup_num_tokens"):
        return f"{owner}: what it is shown is not known from the tokens of the result"
    if call.pad_value is None and (len(criteria) < len(arguments[CRITERIA]) or call.option("stop_strings")):
        return f"{owner}: rows go on until the last has ended, by other criteria too"
    vocabulary = int(getattr(call.model.config.get_text_config(), "vocab_size", 0) or 0)
    sequences = call.rows * int(call.option("num_return_sequences") or 1)
    shown = 2 * 4 * vocabulary * sequences * (call.max_new_tokens or 0) * len(processors)
    if processors and not 0 < shown <= _MOST_SHOWN_BYTES:
        return f"{owner}: the scores of all its steps, {format_gib(shown)}, are more than is kept"
    return None


def _is_library(given: Any) -> bool:
    """Return whether transformers has made it: what looks at a row alone, whichever it is, unless it is one of those named."""
    return type(given).__module__.startswith("transformers.generation")


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))
