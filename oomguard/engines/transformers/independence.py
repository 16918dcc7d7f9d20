"""Decide whether the rows of a model call depend on each other.

For the model classes of transformers a table says so. benchmarks/row_independence.py writes it at
development time. Other code is unknown: oomguard splits it only if its author names the batch with
``oomguard.guard(batch=...)``.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.inputs import Media, is_tensor, tensors

# ``generate`` calls some functions at each step. Those of transformers look at single rows, except
# the ones below. The user's own may look at other rows or keep state, so they prevent a split.

PROCESSORS: Final = "logits_processor"
CRITERIA: Final = "stopping_criteria"
PREFIXES: Final = "prefix_allowed_tokens_fn"
CALLBACK_NAMES: Final = (PROCESSORS, CRITERIA, PREFIXES)
# Functions of transformers that count rows, keep state, or read a clock.
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


def why_not_separate(arguments: Mapping[str, Any]) -> str | None:
    """Return which function may look at other rows or keep state; None if there is none."""
    for argument, each in _functions(arguments):
        if not _is_library(each) or type(each).__name__ in _OF_THE_BATCH:
            return f"the argument {argument}: {_name(each)} may look at other rows or keep state"
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
# Libraries whose hooks do not look at other rows.
_HOOKING: Final = frozenset({"torch", "transformers", "accelerate", "peft"})
# Libraries whose layers do not look at other rows: model code and quantized weights.
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
# Rotary positions whose angles depend on the longest row of a batch.
_ROPE_BY_LENGTH: Final = frozenset({"dynamic", "longrope", "su"})
_NO_ROWS: Final = -1
_ATTENTION: Final = "transformers.modeling_utils"


def records_gradients(model: Any, arguments: Iterable[Any]) -> bool:
    """Return whether a call records gradients, which all parts would have to keep."""
    import torch

    if not torch.is_grad_enabled():
        return False
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return any(parameter.requires_grad for parameter in model.parameters())


def why_rows_depend(
    model: Any, call: str, arguments: Mapping[str, Any], rows: int, tokens: int | None = None
) -> str | None:
    """Return why the rows of a model call cannot run in separate parts; None if they can.

    Args:
        model: the model.
        call: ``forward`` or ``generate``.
        arguments: the call's arguments by name; the advice names those with one entry per row.
        rows: the number of rows.
        tokens: the tokens of the longest row, prompt and answer; None if unknown.
    """
    why = why_state_of(model) or why_rope(model, tokens)
    if why is not None:
        return why
    own = user_code(model)
    if own is not None:
        return f"{own} is your own code. {guard_advice(arguments, rows)}"
    return _by_table(model, call, arguments, rows)


def why_state_of(model: Any) -> str | None:
    """Return which state of the model makes rows depend on the batch; None if there is none."""
    if getattr(model, "training", False):
        return (
            "the model is in training mode, in which rows depend on the batch: call model.eval() "
            "first"
        )
    if (why := why_drawn(model)) is not None:
        return why
    if getattr(getattr(model, "config", None), "expert_capacity", None) is not None:
        return "its experts share a fixed token capacity across the batch"
    for name, module in _modules(model):
        if module.training and hasattr(module, "running_mean"):
            return (
                f"{name} is in training mode, in which it uses the whole batch: call {name}.eval() "
                "first"
            )
    return why_hooked(model)


def why_rope(model: Any, tokens: int | None) -> str | None:
    """Return why rows change each other's positions; None if they do not.

    longrope and dynamic NTK compute their angles from the longest row, once it exceeds the model's
    original context length. ``tokens`` None: unknown.
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
    return f"positions by {kind} depend on the longest row of the batch beyond {window} tokens"


def rope_by_length(config: Any) -> tuple[str | None, Mapping[str, Any]]:
    """Return the rotary position type that depends on the batch, with its parameters.

    The type is None if positions do not depend on the batch.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    # Some configurations have an entry for each type of layer.
    if isinstance(found, Mapping):
        each = (found, *found.values())
    else:
        each = ()
    for rope in each:
        # Older configurations have the name "type".
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type"))
        else:
            kind = None
        if kind in _ROPE_BY_LENGTH:
            return kind, rope
    return None, {}


def why_hooked(model: Any) -> str | None:
    """Return which hook of the user sees a model's rows; None if there is none."""
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
    """Return which module applies dropout; None if none does."""
    for name, module in _modules(model):
        if module.training and _drops(module):
            where = name or "the model"
            return (
                f"{where} applies dropout because it is in training mode: parts would draw other "
                "random numbers than the call"
            )
    return None


def user_code(model: Any) -> str | None:
    """Return the name of the first code in a model that is not a library's; None without any."""
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
        # A model has many layers of one class.
        if kind not in seen:
            seen.add(kind)
            forward = getattr(kind, "forward", None)
            if forward is not None and not _is_of_library(forward):
                return f"{kind.__name__}.forward"
    return _own_attention(model)


def is_library(module_name: Any) -> bool:
    """Return whether a module belongs to a library whose layers do not look at other rows."""
    return str(module_name).partition(".")[0] in _LIBRARIES


def layout_of(model: Any) -> Mapping[str, tuple[int, int]]:
    """Return the result fields of a forward whose rows are not entries of the first axis.

    For each field: the axis, and the entries per row. 0 entries: the number differs between calls.
    -1: no axis has the rows in order, so parts cannot be joined.
    """
    fields = _table()["forward"]["layout"].get(_class_of(model), {})
    return {f"its result[{name!r}]": _place_of(field) for name, field in fields.items()}


def _place_of(field: Mapping[str, Any]) -> tuple[int, int]:
    if not field.get("rows", True) or field.get("interleaved", False):
        return 0, _NO_ROWS
    return field.get("axis", 0), field.get("entries", 1)


def guard_advice(arguments: Mapping[str, Any], rows: int) -> str:
    """Return the line to write for a user who knows that rows do not depend on each other."""
    names = []
    for name, value in arguments.items():
        if rows > 1 and _entries(value) == rows:
            names.append(name)
    batch = ", ".join(f'"{name}"' for name in names) or "..."
    if len(names) > 1:
        batch = f"({batch})"
    return (
        "If no row depends on the others, put the call into a function whose arguments have one "
        f"entry per row, under @oomguard.guard(batch={batch})"
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
        f"oomguard does not know whether the rows of {name} depend on each other. "
        f"{guard_advice(arguments, rows)}"
    )


def _of_version(by_version: Mapping[str, str]) -> str | None:
    """Return what the table says for the newest version up to this one; None if nothing."""
    import transformers
    from packaging.version import Version

    here = Version(transformers.__version__)
    older = []
    for version in by_version:
        if Version(version) <= here:
            older.append(version)
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
    """Return the class name of a model, or of the model that PEFT or torch.compile wraps."""
    # torch.compile and PEFT wrap the model in a class of their own.
    inner = getattr(model, "_orig_mod", model)
    base = getattr(inner, "get_base_model", None)
    if callable(base):
        inner = base()
    return type(inner).__name__


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    return iter(model.named_modules() if hasattr(model, "named_modules") else ())


def _drops(module: Any) -> bool:
    """Return whether a module in training mode applies dropout, by its type or its rate."""
    own = vars(module)
    if "drop" in type(module).__name__.lower():
        rates = [own.get("p"), own.get("drop_prob")]
    else:
        rates = []
    # Attention applies dropout by a function, so only an attribute of its module has the rate.
    for name, value in own.items():
        if "drop" in name.lower():
            rates.append(value)
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def _own_attention(model: Any) -> str | None:
    """Return the user's function that is registered as a model's attention; None without one."""
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
    # A user's decorator copies the library's module name, but not its globals.
    namespace = getattr(function, "__globals__", {})
    return is_library(namespace.get("__name__", getattr(function, "__module__", "")))


def _entries(value: Any) -> int | None:
    """Return the number of entries of a tensor or a list; None for anything else."""
    if hasattr(value, "untyped_storage"):
        if value.dim():
            return int(value.shape[0])
        return None
    if isinstance(value, (list, tuple)):
        return len(value)
    return None


# Arguments of a model's forward: which have one row per input, and which prevent a split.

_DATA: Final = Path(__file__).with_name("forward_arguments.toml")
_PIXEL_AXES: Final = 4


@functools.cache
def names(group: str) -> tuple[str, ...]:
    """Return the argument names of a group in forward_arguments.toml."""
    return tuple(tomllib.loads(_DATA.read_text())[group])


def is_known(name: str) -> bool:
    """Return whether an argument with this name is listed."""
    for group in ("text", "others", "rows", "layers", "shared", "whole", "over_batch"):
        if name in names(group):
            return True
    return False


def is_input(name: str, value: Any) -> bool:
    """Return whether an argument holds input rows; flat image patches do not."""
    if is_tensor(value):
        axes = getattr(value, "ndim", 0)
    else:
        axes = 0
    return axes >= (_PIXEL_AXES if name == "pixel_values" else 2)


def why_over_batch(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return the option that adds results over all rows; None if none is on."""
    for name in names("over_batch"):
        given = arguments.get(name)
        if getattr(model.config, name, False) if given is None else given:
            return (
                f"{name} adds results for the tokens of all rows, and a value over all rows "
                "(aux_loss)"
            )
    return None


def why_not_rows(
    arguments: Mapping[str, Any], rows: int, media: Media, taken: Collection[str] = ()
) -> str | None:
    """Return the argument that prevents a split, and why; None if there is none.

    ``taken`` are unlisted arguments that are split because they have one entry per row.
    """
    if any(arguments.get(name) is not None for name in names("text")):
        for name in names("beside_text"):
            if arguments.get(name) is not None and name not in media.starts and name not in taken:
                why = f"oomguard does not know which rows the argument {name} belongs to"
                return f"{why}. {guard_advice(arguments, rows)}"
    for name, value in arguments.items():
        if name in media.starts or name in taken:
            continue
        if _is_state(value):
            return f"the call extends the argument {name}"
        for tensor in tensors(value):
            if not is_cut(name, tensor, rows) and not _is_whole(name, tensor):
                why = f"oomguard does not know whether the argument {name} has one row per input"
                return f"{why}. {guard_advice(arguments, rows)}"
        if (
            isinstance(value, (list, tuple))
            and len(value) == rows > 1
            and not any(True for _ in tensors(value))
        ):
            return f"the argument {name} has {rows} entries too"
    return None


def is_cut(name: str, value: Any, rows: int) -> bool:
    """Return whether a tensor with this name has one entry per row."""
    known = name in names("rows") or name in names("text") or name in names("others")
    if name == "position_ids" and value.ndim > 2:
        # Some models have an axis of three before the rows.
        known = False
    return bool(known and value.ndim > 0 and value.shape[0] == rows)


def _is_whole(name: str, value: Any) -> bool:
    return (
        value.ndim == 0
        or name in names("whole")
        or (name in names("shared") and value.shape[0] == 1)
    )


def _is_state(value: Any) -> bool:
    """Return whether a value is a KV cache of any form, to which a call adds its tokens."""
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


# Unlisted arguments are split if all inputs of a call have the same number of entries.


def common_rows(arguments: Mapping[str, Any]) -> int | None:
    """Return the common number of entries of a call's tensors; None if it is not at least two.

    At least one must be a tensor with several axes, because the entries of a list may be the rows.
    """
    found = set[int]()
    has_input = False
    for name, value in arguments.items():
        # A value that every part gets whole says nothing about rows.
        if name in names("whole"):
            continue
        found.update(map(_taken_rows_entries, tensors(value)))
        if is_tensor(value) and value.ndim > 1:
            has_input = True
    if len(found) == 1 and has_input:
        rows = found.pop()
    else:
        rows = None
    if rows is not None and rows > 1:
        return rows
    return None


def infer_row_arguments(
    arguments: Mapping[str, Any], rows: int, listed: Collection[str] = ()
) -> frozenset[str]:
    """Return arguments with one entry per row: unlisted ones, and those that ``listed`` names."""
    found = []
    for name, value in arguments.items():
        if (name in listed or not is_known(name)) and _has_rows(value, rows):
            found.append(name)
    return frozenset(found)


def _has_rows(value: Any, rows: int) -> bool:
    is_list = type(value) in (list, tuple) and len(value) != rows and all(map(is_tensor, value))
    # A list with ``rows`` tensors may have one per row.
    is_plain = is_tensor(value) or is_list
    return is_plain and {_taken_rows_entries(tensor) for tensor in tensors(value)} == {rows}


def _taken_rows_entries(tensor: Any) -> int:
    if tensor.ndim:
        return int(tensor.shape[0])
    return 0
