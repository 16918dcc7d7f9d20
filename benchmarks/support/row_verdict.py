"""Whether the rows of a model's call depend on each other: followed under fake tensors, and
compared for real.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from support.model_inputs import ROWS, Inputs, InputsError, Maker
from support.row_tracer.follow_rows import FollowedCall, first_steps, together
from support.row_tracer.origin import PLACE, Origin
from support.row_tracer.result_layout import named
from support.tiny_models import RUNGS, class_named, make

NEW_TOKENS = 4
INDEPENDENT = "independent"
DEPENDENT = "dependent"
UNKNOWN = "unknown"
TRACED = "traced"
NUMERIC = "numeric"
# Of the largest number of a tensor, as in oomguard/guarding/side_by_side.py.
_ALONE_RATIO = 1e-4
_LEAST = 1e-6
_PARTS: tuple[tuple[int, ...], ...] = ((3,), (1, 2), (5, 4, 3, 2, 1, 0))
_STEPS = 2  # the prefill, and one that comes after it
_CAPACITY = re.compile(r"capacity", re.IGNORECASE)
_NEAR = 20
_RESULT = re.compile(r"its result(?:\['(\w+)'\])?")
_MOST_RUNGS_S = 6.0

Run = Callable[[Mapping[str, Any]], Any]


@dataclass(slots=True)
class Verdict:
    """What was found of one call of a class.

    Attributes:
        verdict: independent, dependent or unknown.
        why: the reason, where it is not independent.
        by: ``traced`` or ``numeric``.
        draws: whether the call draws random numbers.
        layout: fields of the result whose rows are not one entry each along the first axis.
        notes: what did not work.
    """

    verdict: str = UNKNOWN
    why: str = ""
    by: str = ""
    draws: bool = False
    layout: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def verdicts(name: str) -> dict[str, dict[str, Any]]:
    """Return the verdicts of a class's ``forward`` and, where it has one, ``generate``."""
    cls = class_named(name)
    notes: list[str] = []
    begun = time.process_time()
    for rung in RUNGS:
        if time.process_time() - begun > _MOST_RUNGS_S:
            break
        try:
            model = make(cls, rung)
            found = {"forward": _forward(model)}
        except Exception as error:  # noqa: BLE001 - any reason leads to the next configuration
            said = _said(error)
            before = notes[-1:]
            notes.append(f"{'+'.join(sorted(rung)) or 'default'}: {said}")
            if before and before[0].endswith(said):
                break  # the size is not what it is about
            continue
        found["forward"].notes += notes
        if model.can_generate():
            try:
                found["generate"] = _generate(model)
            except Exception as error:  # noqa: BLE001 - as above
                found["generate"] = Verdict(why=_said(error))
        found["forward"].layout = _asked_for(model) | found["forward"].layout
        return {call: asdict(verdict) for call, verdict in found.items()}
    return {"forward": asdict(Verdict(why=notes[0] if notes else "", notes=notes))}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def _forward(model: Any) -> Verdict:
    return _of_calls(model, lambda arguments: model(**arguments), None)


def _asked_for(model: Any) -> dict[str, dict[str, Any]]:
    """Return where the rows are in the states and attentions that a call gives where it is asked
    for them.
    """
    with contextlib.suppress(Exception):
        model.set_attn_implementation("eager")  # others give no attentions
    given = {"output_hidden_states": True, "output_attentions": True}
    for flags in (given, {"output_hidden_states": True}, {"output_attentions": True}):
        with contextlib.suppress(Exception):

            def run(arguments: Mapping[str, Any], flags: Mapping[str, bool] = flags) -> Any:
                torch.manual_seed(0)
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")
                    return model(**arguments, **flags)

            return _compared(run, Maker(model, is_padded=False).find(run, media=False)).layout
    return {}


def _generate(model: Any) -> Verdict:
    config = model.generation_config
    config.eos_token_id = None
    config.pad_token_id = 0
    config.max_length = None
    if getattr(config, "decoder_start_token_id", None) is None and model.config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return _of_calls(model, lambda arguments: model.generate(**arguments, **options), options)


def _of_calls(model: Any, call: Run, options: Mapping[str, Any] | None) -> Verdict:
    """Return the verdict of calls with full rows and with padded ones, of text alone and with
    images.
    """
    found: list[Verdict] = []
    said: list[str] = []
    seen: list[dict[str, Any]] = []

    def run(arguments: Mapping[str, Any]) -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return call(arguments)

    # The layout of a result is told by full rows.
    for is_padded, media in ((False, False), (True, False), (False, True)):
        maker = Maker(model, is_padded, for_generate=options is not None)
        if media and not maker.has_media:
            continue
        try:
            inputs = maker.find(run, media)
        except InputsError as error:
            said.append(str(error)[:400])
            continue
        given = inputs.of(range(ROWS))
        if any(_is_same(given, other) for other in seen):
            continue
        seen.append(given)
        # Padding is followed: it takes the ways of full rows too, which are compared.
        follows = is_padded or media or not maker.is_text
        found.append(_verdict(model, run, inputs, options, follows=follows))
        found[-1].notes.append("given " + ", ".join(given))
        if found[-1].verdict == DEPENDENT:
            break
    if not found:
        raise InputsError(said[0])
    made = _all_of(found)
    made.notes += [f"no inputs: {each}" for each in said]
    return made


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else True
        for name, value in one.items()
    )


def _all_of(found: Sequence[Verdict]) -> Verdict:
    """Return one verdict of several calls: dependent where one is, unknown where none is known."""
    order = {DEPENDENT: 0, INDEPENDENT: 1, UNKNOWN: 2}
    chosen = min(found, key=lambda one: order[one.verdict])
    layout: dict[str, dict[str, Any]] = {}
    for one in found:
        layout.update(one.layout)
    is_traced = any(one.by == TRACED for one in found)
    return Verdict(
        chosen.verdict,
        chosen.why,
        TRACED if chosen.verdict == INDEPENDENT and is_traced else chosen.by,
        any(one.draws for one in found),
        layout,
        [note for one in found for note in one.notes],
    )


def _verdict(
    model: Any, run: Run, inputs: Inputs, options: Mapping[str, Any] | None, *, follows: bool
) -> Verdict:
    numeric = _compared(run, inputs)
    found = Verdict(draws=numeric.draws, layout=numeric.layout)
    if not follows and not numeric.draws:
        found.verdict = numeric.verdict
        found.why = numeric.why
        found.by = NUMERIC
        return found
    try:
        origin = _followed(model, inputs, options)
    except Exception as error:  # noqa: BLE001 - a model's code under fake tensors
        found.notes.append(f"not traced: {_said(error)}")
        if not numeric.draws:
            found.verdict = numeric.verdict
            found.why = numeric.why
            found.by = NUMERIC
        return found
    if origin is not None:
        found.verdict, found.why, found.by = DEPENDENT, reason(origin), TRACED
        found.notes.append(f"{origin}; compared: {numeric.verdict} {numeric.why}")
    elif numeric.verdict == DEPENDENT and not numeric.draws:
        found.verdict = DEPENDENT
        found.why = numeric.why
        found.by = NUMERIC
        found.notes.append("traced as independent")
    else:
        found.verdict = INDEPENDENT
        found.by = TRACED
    return found


def _followed(model: Any, inputs: Inputs, options: Mapping[str, Any] | None) -> Origin | None:
    """Return what the tracer says makes a row depend on others, None where nothing does; raises
    what the model raises.
    """

    if inputs.is_packed:
        raise InputsError("a row has several entries in an argument")

    def arguments(change: Callable[[Any], Any]) -> dict[str, Any]:
        return {
            **inputs.others,
            **(options or {}),
            **{name: change(value) for name, value in inputs.rows.items()},
        }

    def run(twin: Any, given: Mapping[str, Any]) -> object:
        if options is None:
            return twin(**given)
        return first_steps(twin, given, _STEPS)

    mask = inputs.rows.get("attention_mask")
    is_full = mask is None or bool((mask != 0).all())
    return together(FollowedCall(model, arguments, ROWS, run, is_full)).origin


def reason(origin: Origin) -> str:
    """Return why rows depend on each other, in words that the next version of a model's code leaves
    as they are.
    """
    if origin.operation == PLACE:
        return "the place of a row in the batch decides what it gives"
    text = origin.text
    near = "".join(
        linecache.getlines(origin.file)[max(0, origin.line - _NEAR) : origin.line + _NEAR]
    )
    if _CAPACITY.search(near):
        return "its experts share a fixed token capacity across the batch"
    if "batch_norm" in origin.operation:
        return "it normalizes over the whole batch"
    return f"it takes {origin.operation} over all rows" + (f" (`{text}`)" if text else "")


@dataclass(slots=True)
class _Compared:
    verdict: str
    why: str = ""
    draws: bool = False
    layout: dict[str, dict[str, Any]] = field(default_factory=dict)


def _compared(run: Run, inputs: Inputs) -> _Compared:
    """Compare rows alone with the same rows next to others."""
    whole = _tensors(run(inputs.of(range(ROWS))))
    if not whole:
        return _Compared(UNKNOWN, "it gives no tensors")
    draws = _has_drawn()
    parts: list[tuple[tuple[int, ...], dict[str, torch.Tensor]]] = []
    for order in _PARTS:
        try:
            parts.append((order, _tensors(run(inputs.of(order)))))
        except Exception as error:  # noqa: BLE001 - rows that cannot run alone
            return _Compared(UNKNOWN, f"{len(order)} rows alone: {_said(error)}", draws)
    layout: dict[str, dict[str, Any]] = {
        _field(name): {"list": True} for name in _join_lists(whole, parts)
    }
    worst = ""
    for name, tensor in whole.items():
        place = _place(tensor, [(len(order), part.get(name)) for order, part in parts])
        label = _field(name)
        if place is None:
            layout[label] = {"rows": False}
            if tensor.dim() and not draws and not _is_fixed(tensor, parts, name):
                worst = worst or _why_no_place(label, tensor, parts, name)
            continue
        axis, entries = place
        is_mixed = False
        for order, part in parts:
            if draws or _agree(tensor, part[name], axis, entries, order):
                continue
            is_mixed = entries > 1 and _agree(tensor, part[name], axis, entries, order, across=True)
            if not is_mixed:
                worst = worst or f"{label} of a row differs with the rows next to it"
        if (axis or entries > 1 or is_mixed) and layout.get(label, {}).get("rows", True):
            layout[label] = {"axis": axis, "entries": 1 if entries == 1 else 0}
            if is_mixed:
                layout[label]["interleaved"] = True
    if worst and not draws:
        return _Compared(DEPENDENT, worst, draws, layout)
    return _Compared(INDEPENDENT, "", draws, layout)


def _join_lists(
    whole: dict[str, torch.Tensor], parts: Sequence[tuple[Sequence[int], dict[str, torch.Tensor]]]
) -> list[str]:
    """Put lists with one tensor a row together, and return what they are called."""
    found = []
    for start in sorted({name.rpartition("[")[0] for name in whole if name[-2].isdigit()}):
        names = [f"{start}[{number}]" for number in range(ROWS)]
        calls: list[tuple[int, dict[str, torch.Tensor]]] = [
            (ROWS, whole),
            *((len(order), part) for order, part in parts),
        ]
        if any(
            sum(name.rpartition("[")[0] == start for name in given) != rows for rows, given in calls
        ):
            continue
        with contextlib.suppress(RuntimeError, KeyError):  # of several shapes
            joined = [torch.stack([given[name] for name in names[:rows]]) for rows, given in calls]
            for (rows, given), tensor in zip(calls, joined, strict=True):
                for name in names[:rows]:
                    del given[name]
                given[start] = tensor
            found.append(start)
    return found


def _has_drawn() -> bool:
    """Return whether the last call drew random numbers: each begins with the same seed."""
    after = torch.random.get_rng_state()
    torch.manual_seed(0)
    return not torch.equal(after, torch.random.get_rng_state())


def _tensors(result: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in named(result, "its result")
        if isinstance(tensor, torch.Tensor)
    }


def _field(name: str) -> str:
    found = _RESULT.match(name)
    return (found[1] if found else None) or "result"


def _place(
    tensor: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor | None]]
) -> tuple[int, int] | None:
    """Return the axis of the rows, and how many entries each has there; None where no axis counts
    them.
    """
    found = []
    for axis, size in enumerate(tensor.shape):
        if size % ROWS or not size:
            continue
        entries = size // ROWS
        if all(
            part is not None and part.dim() == tensor.dim() and part.shape[axis] == rows * entries
            for rows, part in parts
        ):
            found.append((axis, entries))
    if len(found) == 1:
        return found[0]
    return None


def _why_no_place(
    label: str,
    tensor: torch.Tensor,
    parts: Sequence[tuple[Any, Mapping[str, torch.Tensor]]],
    name: str,
) -> str:
    is_of_pairs = all(
        name in part
        and [size // ROWS * len(order) for size in tensor.shape[:2]] == list(part[name].shape[:2])
        for order, part in parts
    )
    if is_of_pairs and tensor.dim() > 1:
        return f"{label} has an entry for each pair of rows"
    return f"{label} differs with the rows next to it"


def _is_fixed(
    tensor: torch.Tensor, parts: Sequence[tuple[Any, Mapping[str, torch.Tensor]]], name: str
) -> bool:
    """Return whether a tensor is the same whatever rows there are."""
    return all(name in part and part[name].shape == tensor.shape for _, part in parts) and all(
        _close(tensor, part[name]) for _, part in parts
    )


def _agree(
    whole: torch.Tensor,
    part: torch.Tensor,
    axis: int,
    entries: int,
    order: Sequence[int],
    *,
    across: bool = False,
) -> bool:
    return _close(
        _by_row(whole, axis, entries, across)[list(order)], _by_row(part, axis, entries, across)
    )


def _by_row(tensor: torch.Tensor, axis: int, entries: int, across: bool) -> torch.Tensor:
    moved = tensor.movedim(axis, 0)
    rows = moved.shape[0] // entries
    if across:
        return moved.reshape(entries, rows, -1).transpose(0, 1)
    return moved.reshape(rows, entries, -1)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    one = one.double()
    other = other.double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    if not finite.any():
        return True
    scale = max(_LEAST, float(one[finite].abs().max().detach()))
    return float((one - other)[finite].abs().max()) <= _ALONE_RATIO * scale
