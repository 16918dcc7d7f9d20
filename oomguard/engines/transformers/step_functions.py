"""Functions that ``generate`` calls at each step: which of them may be called for some rows of a
batch.

Those of transformers look at a row alone, unless they are named here. The user's own may look at
other rows or keep a state, so a call with one is not run in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

PROCESSORS: Final = "logits_processor"
CRITERIA: Final = "stopping_criteria"
PREFIXES: Final = "prefix_allowed_tokens_fn"
NAMES: Final = (PROCESSORS, CRITERIA, PREFIXES)
# Of transformers' own those that count rows, keep a state, or look at a clock.
_OF_THE_BATCH: Final = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "ConfidenceCriteria",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "MaxTimeCriteria",
        "PrefixConstrainedLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    }
)


def why_not_apart(arguments: Mapping[str, Any]) -> str | None:
    """Return which function may look at other rows, or keep a state from call to call; None if none
    may.
    """
    for argument, each in _functions(arguments):
        if not _is_library(each) or type(each).__name__ in _OF_THE_BATCH:
            return f"the argument {argument}: {_name(each)} may look at other rows, or keep a state"
    return None


def _functions(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for argument in (PROCESSORS, CRITERIA):
        for each in arguments.get(argument) or ():
            yield argument, each
    if arguments.get(PREFIXES) is not None:
        yield PREFIXES, arguments[PREFIXES]


def _is_library(function: Any) -> bool:
    return type(function).__module__.startswith("transformers.generation")


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
