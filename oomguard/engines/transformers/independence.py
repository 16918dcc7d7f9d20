"""Whether the rows of a model's call depend on each other.

For the model classes of transformers a table says so, which benchmarks/row_independence.py writes
at development time. Code that is no library's is unknown: its rows are run apart only if its
author names them, with ``oomguard.guard(batch=...)``.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.inputs import is_tensor, tensors
from oomguard.engines.transformers.media import Media

# Functions that ``generate`` calls at each step: which of them may be called for some rows of a
# batch.
#
# Those of transformers look at a row alone, unless they are named here. The user's own may look at
# other rows or keep a state, so a call with one is not run in parts.

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


_TABLE: Final = Path(__file__).with_name("row_independence.toml")
# Libraries whose hooks on a module do not look at rows.
_HOOKING: Final = frozenset({"torch", "transformers", "accelerate", "peft"})
# Libraries whose layers look at no other row: those of models, and of quantized weights.
_LIBRARIES: Final = _HOOKING | {
    "auto_gptq",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "functools",
    "gptqmodel",
    "hqq",
    "oomguard",
    "optimum",
    "sentence_transformers",
    "timm",
    "torchao",
    "wrapt",
}
# Rotary positions whose angles follow from the length of a batch.
_ROPE_BY_LENGTH: Final = frozenset({"dynamic", "longrope", "su"})
_NO_ROWS: Final = -1
_ATTENTION: Final = "transformers.modeling_utils"


def records_gradients(model: Any, arguments: Iterable[Any]) -> bool:
    """Return whether a call records gradients: its parts would each need theirs until
    all are done.
    """
    import torch

    if not torch.is_grad_enabled():
        return False
    given = (value for value in arguments if isinstance(value, torch.Tensor))
    return any(tensor.requires_grad for tensor in given) or any(
        p.requires_grad for p in model.parameters()
    )


def why_rows_depend(
    model: Any, call: str, arguments: Mapping[str, Any], rows: int, tokens: int | None = None
) -> str | None:
    """Return why the rows of a model's call cannot be run apart; None if they can.

    Args:
        model: the model.
        call: ``forward`` or ``generate``.
        arguments: the arguments of the call by name; the advice names those with one entry a row.
        rows: how many rows the call has.
        tokens: the tokens of its longest row, prompt and answer; None if they are not known.
    """
    why = why_state_of(model) or why_rope(model, tokens)
    if why is not None:
        return why
    own = own_code(model)
    if own is not None:
        return f"{own} is code of your own. {line_to_write(arguments, rows)}"
    return _by_table(model, call, arguments, rows)


def why_state_of(model: Any) -> str | None:
    """Return what the model is in that makes rows depend on the batch, or on hooks; None if nothing
    is.
    """
    if getattr(model, "training", False):
        return (
            "the model is in training mode, where rows depend on the batch: call model.eval() first"
        )
    if (why := why_drawn(model)) is not None:
        return why
    if getattr(getattr(model, "config", None), "expert_capacity", None) is not None:
        return "its experts take a number of tokens of the whole batch"
    for name, module in _modules(model):
        if module.training and hasattr(module, "running_mean"):
            return (
                f"{name} is in training mode, where it looks at the whole batch: call "
                f"{name}.eval() first"
            )
    return why_hooked(model)


def why_rope(model: Any, tokens: int | None) -> str | None:
    """Return why rows of these tokens change each other's positions; None if they do not.

    longrope and dynamic NTK take their angles from the longest row of the batch, once it is longer
    than the model's original window.
    """
    config: Any = getattr(model, "config", None)
    kind, rope = rope_by_length(config)
    if kind is None:
        return None
    window = rope.get("original_max_position_embeddings")
    window = window or getattr(config, "original_max_position_embeddings", None)
    window = window or getattr(config, "max_position_embeddings", None) or 0
    if tokens is not None and tokens <= window:
        return None
    return f"positions by {kind} change with the longest row of the batch, beyond {window} tokens"


def rope_by_length(config: Any) -> tuple[str | None, Mapping[str, Any]]:
    """Return the kind of rotary positions whose angles follow from the length of a batch, and its
    parameters.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(found, Mapping):
        each = (found, *found.values())
    else:
        each = ()
    for rope in each:
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type"))
        else:
            kind = None
        if kind in _ROPE_BY_LENGTH:
            return kind, rope
    return None, {}


def why_hooked(model: Any) -> str | None:
    """Return which function of the user's own a model calls with the rows that run; None if it
    calls none.
    """
    import torch

    everywhere = torch.nn.modules.module
    for hooks in (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks):
        if not all(map(_is_of_library, hooks.values())):
            return "a hook on all modules would see the rows of each part"
    for name, module in _modules(model):
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_of_library(hook):
                return f"a hook on {name or 'the model'} would see the rows of each part"
    return None


def why_drawn(model: Any) -> str | None:
    """Return which module drops at random what rows hold; None if none does."""
    for name, module in _modules(model):
        if module.training and _drops(module):
            where = name or "the model"
            return (
                f"{where} drops at random (it is in training mode): parts would draw other numbers "
                "than the call"
            )
    return None


def own_code(model: Any) -> str | None:
    """Return the name of the first code of a model that is no library's; None if there is none."""
    seen: set[type] = set()
    for name, module in _modules(model):
        kind = type(module)
        if not is_library(kind.__module__):
            return kind.__name__
        for attribute, value in vars(module).items():
            if callable(value) and hasattr(value, "__code__") and not _is_of_library(value):
                if name:
                    return f"{name}.{attribute}"
                return str(attribute)
        if kind not in seen:
            seen.add(kind)
            forward = getattr(kind, "forward", None)
            if forward is not None and not _is_of_library(forward):
                return f"{kind.__name__}.forward"
    return _own_attention(model)


def is_library(module_name: Any) -> bool:
    """Return whether a Python module of this name is of a library whose layers look at no other
    row.
    """
    return str(module_name).partition(".")[0] in _LIBRARIES


def layout_of(model: Any) -> Mapping[str, tuple[int, int]]:
    """Return the fields of a forward's result whose rows are not one entry each along the first
    axis.

    For each field the axis, and the entries a row: 0 if that differs from call to call, -1 if no
    axis holds the rows in order, so that parts cannot be put together.
    """
    fields = _table()["forward"]["layout"].get(_class_of(model), {})
    return {f"its result[{name!r}]": _place_of(field) for name, field in fields.items()}


def _place_of(field: Mapping[str, Any]) -> tuple[int, int]:
    if not field.get("rows", True) or field.get("interleaved", False):
        return 0, _NO_ROWS
    return field.get("axis", 0), field.get("entries", 1)


def line_to_write(arguments: Mapping[str, Any], rows: int) -> str:
    """Return what to write so that a call runs in parts, for somebody who knows that no row depends
    on another.
    """
    names = [name for name, value in arguments.items() if rows > 1 and _entries(value) == rows]
    batch = ", ".join(f'"{name}"' for name in names) or "..."
    if len(names) > 1:
        batch = f"({batch})"
    return (
        "If no row depends on the others, make the call in a function that takes what has one "
        "entry a row, "
        f"under @oomguard.guard(batch={batch})"
    )


# What to write for a model that compares each image with each text: the texts stay the same.
_ONE_SIDE: Final = (
    "Make the call in a function that takes the images alone and returns logits_per_image, under "
    '@oomguard.guard(batch="pixel_values"): the texts stay the same in each part'
)


def _by_table(model: Any, call: str, arguments: Mapping[str, Any], rows: int) -> str | None:
    table = _table()[call]
    name = _class_of(model)
    if name in table["independent"]:
        return None
    if name in table["dependent"]:
        reason = str(table["dependent"][name])
        if "pair of rows" in reason:
            return f"{reason}. {_ONE_SIDE}"
        return reason
    why = _of_version(table["by_version"].get(name, {}))
    if why is not None:
        return why or None
    return (
        f"whether the rows of {name} depend on each other is not known. "
        f"{line_to_write(arguments, rows)}"
    )


def _of_version(by_version: Mapping[str, str]) -> str | None:
    """Return what the table says of the newest version up to this one; None if it says nothing."""
    import transformers
    from packaging.version import Version

    here = Version(transformers.__version__)
    older = [version for version in by_version if Version(version) <= here]
    if older:
        return by_version[max(older, key=Version)]
    return None


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    for call in ("forward", "generate"):
        table[call]["independent"] = frozenset(table[call]["independent"])
    return table


def _class_of(model: Any) -> str:
    """Return the name of a model's class, of the model inside where PEFT or torch.compile is around
    it.
    """
    inner = getattr(model, "_orig_mod", model)
    base = getattr(inner, "get_base_model", None)
    if callable(base):
        inner = base()
    return type(inner).__name__


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    return iter(model.named_modules() if hasattr(model, "named_modules") else ())


def _drops(module: Any) -> bool:
    """Return whether a module in training mode drops: it is for that, or has a rate for it."""
    own = vars(module)
    if "drop" in type(module).__name__.lower():
        rates = [own.get("p"), own.get("drop_prob")]
    else:
        rates = []
    rates += [value for name, value in own.items() if "drop" in name.lower()]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def _own_attention(model: Any) -> str | None:
    """Return the user's own function that is registered as a model's attention; None if it is a
    library's.
    """
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    known = getattr(sys.modules.get(_ATTENTION), "ALL_ATTENTION_FUNCTIONS", {})
    if not isinstance(name, str) or name not in known:
        return None
    if _is_of_library(known[name]):
        return None
    return f"the attention {name}"


def _is_of_library(function: Any) -> bool:
    while hasattr(function, "func"):
        function = function.func
    namespace = getattr(
        function, "__globals__", {}
    )  # a decorator of the user's own copies the name of the module
    return is_library(namespace.get("__name__", getattr(function, "__module__", "")))


def _entries(value: Any) -> int | None:
    """Return how many entries a tensor or a list has; None for anything else."""
    if hasattr(value, "untyped_storage"):
        if value.dim():
            return int(value.shape[0])
        return None
    if isinstance(value, (list, tuple)):
        return len(value)
    return None


# Which arguments of a model's forward hold rows, and which forbid that they are run apart.

_DATA: Final = Path(__file__).with_name("forward_arguments.toml")
_PIXEL_AXES: Final = 4


@functools.cache
def names(group: str) -> tuple[str, ...]:
    """Return the names of arguments of a kind."""
    return tuple(tomllib.loads(_DATA.read_text())[group])


def is_known(name: str) -> bool:
    """Return whether it is known what an argument of this name holds."""
    return any(
        name in names(group)
        for group in ("text", "others", "rows", "layers", "shared", "whole", "over_batch")
    )


def is_input(name: str, value: Any) -> bool:
    """Return whether an argument is an input of rows; flat patches of images of any
    size are not.
    """
    if is_tensor(value):
        axes = getattr(value, "ndim", 0)
    else:
        axes = 0
    return axes >= (_PIXEL_AXES if name == "pixel_values" else 2)


def why_over_batch(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return the option that adds to the result what belongs to all rows together; None where none
    is on.
    """
    for name in names("over_batch"):
        given = arguments.get(name)
        if getattr(model.config, name, False) if given is None else given:
            return (
                f"{name} adds results of the tokens of all rows together, and a number over all "
                "rows (aux_loss)"
            )
    return None


def why_not_rows(
    arguments: Mapping[str, Any], rows: int, media: Media, taken: Collection[str] = ()
) -> str | None:
    """Return the argument that forbids a split, and why; None where each one is cut, or is for all
    rows together.

    ``taken`` are those that are cut though nobody has listed them.
    """
    if any(arguments.get(name) is not None for name in names("text")):
        for name in names("beside_text"):
            if arguments.get(name) is not None and name not in media.starts and name not in taken:
                why = f"the argument {name} is not known to belong to the text row by row"
                return f"{why}. {line_to_write(arguments, rows)}"
    for name, value in arguments.items():
        if name in media.starts or name in taken:
            continue
        if _is_state(value):
            return f"the argument {name} is extended by the call"
        for tensor in tensors(value):
            if not is_cut(name, tensor, rows) and not _is_whole(name, tensor):
                why = f"the argument {name} is not known to hold one row per input"
                return f"{why}. {line_to_write(arguments, rows)}"
        if (
            isinstance(value, (list, tuple))
            and len(value) == rows > 1
            and not any(True for _ in tensors(value))
        ):
            return f"the argument {name} has {rows} entries too"
    return None


def is_cut(name: str, value: Any, rows: int) -> bool:
    """Return whether a tensor of this name has one entry a row."""
    known = name in names("rows") or name in names("text") or name in names("others")
    if name == "position_ids" and value.ndim > 2:
        known = False  # some models put an axis of three before the rows
    return bool(known and value.ndim > 0 and value.shape[0] == rows)


def _is_whole(name: str, value: Any) -> bool:
    return (
        value.ndim == 0
        or name in names("whole")
        or (name in names("shared") and value.shape[0] == 1)
    )


def _is_state(value: Any) -> bool:
    """Return whether a value is a cache, in whatever form: a call adds its own tokens to it."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


# Arguments that nobody has listed, taken for rows where all that a call is given has as many
# entries.


def common_rows(arguments: Mapping[str, Any]) -> int | None:
    """Return how many entries every tensor of a call has that has no known input; None where they
    differ, or are fewer than two.

    One of them is a tensor of several axes by itself: of a list alone, its entries may be the rows.
    """
    given = {name: value for name, value in arguments.items() if name not in names("whole")}
    found = {_taken_rows_entries(tensor) for value in given.values() for tensor in tensors(value)}
    has_input = any(is_tensor(value) and value.ndim > 1 for value in given.values())
    if len(found) == 1 and has_input:
        rows = found.pop()
    else:
        rows = None
    if rows is not None and rows > 1:
        return rows
    return None


def taken_for_rows(
    arguments: Mapping[str, Any], rows: int, beside: Collection[str] = ()
) -> frozenset[str]:
    """Return the arguments that are taken for one entry a row: no other is listed under their
    names, and ``beside`` the text.
    """
    return frozenset(
        name
        for name, value in arguments.items()
        if (name in beside or not is_known(name)) and _has_rows(value, rows)
    )


def _has_rows(value: Any, rows: int) -> bool:
    is_list = type(value) in (list, tuple) and len(value) != rows and all(map(is_tensor, value))
    is_plain = is_tensor(value) or is_list  # a list of as many may have a tensor for each row
    return is_plain and {_taken_rows_entries(tensor) for tensor in tensors(value)} == {rows}


def _taken_rows_entries(tensor: Any) -> int:
    if tensor.ndim:
        return int(tensor.shape[0])
    return 0
