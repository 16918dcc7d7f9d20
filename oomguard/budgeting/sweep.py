"""The same plan for several values of one setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from oomguard.budgeting.call import AskedCall
from oomguard.budgeting.start import AskedStart
from oomguard.budgeting.values import CALL_SETTINGS, START_SETTINGS, parse_word
from oomguard.errors import SettingError
from oomguard.memory.generate.call import CallBudget
from oomguard.memory.vllm.start import StartBudget
from oomguard.memory.vllm.start_budget import budget_start

_OF_A_START: Final = {
    name: START_SETTINGS.get(name, "int")
    for name in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "block_size",
        "gpu_total_bytes",
        "kv_cache_dtype",
    )
}
_OF_A_CALL: Final = {
    name: CALL_SETTINGS[name] for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams")
}


def sweep_start(asked: AskedStart, text: str) -> tuple[str, list[tuple[str, StartBudget | str]]]:
    """Budget a start for each value of a setting.

    Args:
        asked: the start.
        text: ``SETTING=V1,V2,…``

    Returns:
        The setting's name, and each value with its budget, or with what the engine would refuse it for: one value must not
        hide the others.

    Raises:
        SettingError: the text is not a sweep, or the setting cannot have a value.
    """
    name, values = _read(text, _OF_A_START)
    rows: list[tuple[str, StartBudget | str]] = []
    for word, value in values:
        try:
            rows.append((word, budget_start(asked.model, replace(asked.settings, **{name: value}))))
        except SettingError as error:
            rows.append((word, str(error)))
    return name, rows


def sweep_call(asked: AskedCall, text: str) -> tuple[str, list[tuple[str, CallBudget]]]:
    """Budget a call for each value of a setting, ``SETTING=V1,V2,…``; raises SettingError."""
    name, values = _read(text, _OF_A_CALL)
    calls = ((word, replace(asked, call=replace(asked.call, **{name: value}))) for word, value in values)
    return name, [(word, one.budget()) for word, one in calls]


def _read(text: str, known: Mapping[str, str]) -> tuple[str, list[tuple[str, Any]]]:
    """Return a sweep's setting, and its values as written and as read."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if name not in known or not equals or not values:
        raise SettingError(f"not a sweep: {text!r}", hint=f"SETTING=V1,V2 with one of {', '.join(known)}")
    return name, [(word.strip(), parse_word(name, word.strip(), known)) for word in values.split(",")]
