"""Run ``generate`` of Hugging Face transformers in parts that give the same rows in order."""

from __future__ import annotations

import contextlib
import functools
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import OomguardError
from oomguard.core.facts import FactValue
from oomguard.engines.transformers.call_state import CallState, join_row_state
from oomguard.engines.transformers.forward import no_weight
from oomguard.engines.transformers.forward_variants import run_in_chunks
from oomguard.engines.transformers.generate_variants import (
    as_changed,
    generate_another_way,
    with_left_out,
)
from oomguard.engines.transformers.independence import (
    CALLBACK_NAMES,
    CRITERIA,
    guard_advice,
    infer_row_arguments,
    why_not_separate,
    why_rows_depend,
)
from oomguard.engines.transformers.inputs import (
    CACHE_NAMES,
    Media,
    by_name,
    given_cache,
    holds_tensors,
    is_tensor,
    main_input,
    main_name,
    media_of,
    new_tokens,
    option_of,
    rows_and_tokens,
    tokens_in,
)
from oomguard.estimate.call.call_budget import generate_row_bytes
from oomguard.estimate.model.shape import read_shape

if TYPE_CHECKING:
    from oomguard.engines.transformers.call_state import Draws


# A beam search records the beam of each token, numbered over the whole batch.
_FIELD = "beam_indices"


def number_beams(record: Any, rows: int, beams: int) -> Any:
    """Return a record with beams numbered as in one call of ``rows`` rows.

    Each part starts at beam 0. Beam ``b`` of row ``r`` has the number ``r * beams + b``; after the
    end of a sequence the numbers are negative.
    """
    import torch

    if hasattr(record, "get"):
        indices = record.get(_FIELD)
    else:
        indices = None
    if indices is not None:
        sequences = indices.shape[0] // rows
        first = (
            torch.arange(rows, dtype=indices.dtype, device=indices.device).repeat_interleave(
                sequences
            )[:, None]
            * beams
        )
        record[_FIELD] = torch.where(indices < 0, indices, first + indices % beams)
    return record


# Arguments with one text per row, if they are lists with as many entries.
ROW_LISTS: Final = frozenset({"adapter_names", "language"})
# Arguments that belong to the whole batch, or count its rows.
UNSPLITTABLE: Final = (
    "streamer",
    *CACHE_NAMES,
    "assistant_model",
    "encoder_outputs",
    "custom_generate",
    "negative_prompt_ids",
)
_DATA: Final = Path(__file__).with_name("forward_arguments.toml")
_TEXT: Final = "text"


@functools.cache
def _row_arguments() -> frozenset[str]:
    return frozenset(tomllib.loads(_DATA.read_text())["generate"])


def is_row_argument(name: str) -> bool:
    """Return whether an argument with this name has one row per input."""
    return name in _row_arguments()


def is_overridden(model: Any) -> bool:
    """Return whether a model class overrides transformers' ``generate``."""
    for base in type(model).__mro__:
        if "generate" in vars(base):
            return base.__module__ != "transformers.generation.utils"
    return False


def why_not_rows(model: Any) -> str | None:
    """Return why a model's output is not one row of tokens per input; None if it may be."""
    gives = getattr(model, "output_modalities", None) or (_TEXT,)
    if is_overridden(model) and _TEXT not in gives:
        return (
            f"generate of {type(model).__name__} gives {' and '.join(map(str, gives))}, not one "
            "row of tokens per input"
        )
    return None


def is_of_all_rows(model: Any, name: str, value: Sequence[Any], rows: int) -> bool:
    """Return whether a part may get this list.

    It may if the list has one text per row, is a generation option, or is not a list of rows.
    """
    if name in ROW_LISTS:
        return len(value) == rows
    return (
        rows == 1 or len(value) != rows or hasattr(getattr(model, "generation_config", None), name)
    )


def estimate_row_bytes(
    model: Any, prompt_tokens: int | None, max_new_tokens: int | None, *, sequences: int = 1
) -> int | None:
    """Return the bytes that one row of ``generate`` needs next to the weights, by a formula.

    None if no formula applies.

    Args:
        model: the model; only its configuration is read.
        prompt_tokens: tokens of the prompt, with padding; None if unknown.
        max_new_tokens: new tokens that the call may generate; None if unknown.
        sequences: beams, or returned sequences, per row.
    """
    config: Any = getattr(model, "config", None)
    if prompt_tokens is None or max_new_tokens is None or not hasattr(config, "to_dict"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    eager = getattr(config, "_attn_implementation", None) == "eager"
    try:
        shape = read_shape(config.to_dict())
        return sequences * generate_row_bytes(
            shape, prompt_tokens, max_new_tokens, padded=True, eager=eager
        )
    # A configuration without the usual fields has no formula.
    except (OomguardError, TypeError, ValueError):
        return None


# Options that make the result a record of fields.
_RECORDS: Final = ("return_dict_in_generate", "return_token_timestamps")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of ``generate``: its rows and lengths, and how to split it and join the parts."""

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int
    prompt_tokens: int | None
    draws: Draws
    began: CallState
    may_train: bool = False
    phase: str | None = "generate"
    chunk_tokens: int | None = None  # chunks for every model call, if generate has no own chunks
    attention: str | None = None  # the attention implementation; None: the model's own
    cache_on_host: bool = False  # whether the layers of the KV cache wait on the host
    left_out: Any = None  # tokens that were cut from the prompts; None: none were
    # The row attributes that each part leaves, by its first row.
    left: dict[int, list[tuple[Any, str, Any]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        began: CallState | None = None,
    ) -> GenerateCall:
        """Read a call, but no more than a successful call needs.

        ``began`` is the state that ``begin`` recorded before the call; None: record it now.
        """
        from oomguard.engines.transformers.call_state import Draws

        rows, prompt_tokens = rows_and_tokens(model, args, kwargs)
        # An overriding generate (Whisper's) samples again for some of the rows.
        if began is None:
            began = cls.begin(model, args, kwargs)
        began.restore_layers(model)
        draws = Draws(began.states, rows, may_draw=not is_overridden(model))
        return cls(model, args, kwargs, rows, prompt_tokens, draws, began)

    @staticmethod
    def begin(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallState:
        """Record the state that a call changes besides its result."""
        return CallState.now(model, main_input(model, args, kwargs), given_cache(kwargs))

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Let rows ``start`` to ``stop`` see the random numbers and state of the whole call."""
        # The failed call, or the part before, may have changed both.
        self.began.restore(self.kwargs)
        self.began.restore_layers(self.model)
        with self.draws.of_rows(start, stop), contextlib.ExitStack() as stack:
            stack.callback(self.began.restore_layers, self.model)
            for model in (self.model, self.kwargs.get("assistant_model")):
                if self.chunk_tokens is not None and model is not None:
                    stack.enter_context(run_in_chunks(model, self.chunk_tokens))
            stack.enter_context(self.changed(self.model))
            stack.enter_context(join_row_state(self.model, self.left, start, self.rows - stop))
            yield

    def changed(self, model: Any) -> AbstractContextManager[None]:
        """Return the context in which a model runs as this variant of the call."""
        return as_changed(model, self.attention, cache_is_on_host=self.cache_on_host)

    def varied(
        self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
    ) -> GenerateCall | str:
        """Return the call with these settings changed, or why that is impossible."""
        return generate_another_way(self, changes, failed_in)

    @property
    def not_splittable(self) -> str | None:
        """Why the call cannot be split into rows; None if it can."""
        import torch

        args = self.args
        kwargs = self.kwargs
        rows = self.rows
        main = main_input(self.model, args, kwargs)
        if not isinstance(main, torch.Tensor) or main.dim() < 2:
            return "the call has no input tensor with rows"
        if (why := why_not_rows(self.model)) is not None:
            return why
        if self.gives_record and self.several and is_overridden(self.model):
            return (
                "return_dict_in_generate with several sequences per input: the order of its "
                "entries is unknown"
            )
        if any(argument is not None for argument in args[2:]) or (
            len(args) > 1 and holds_tensors(args[1])
        ):
            return "positional arguments after the configuration belong to the whole batch"
        for name in UNSPLITTABLE:
            if kwargs.get(name) is not None and kwargs[name] != []:
                return f"the argument {name} belongs to the whole batch"
        media = self.media()
        if isinstance(media, str):
            return f"{media}. {guard_advice(kwargs, rows)}"
        if (why := why_not_separate(kwargs)) is not None:
            return f"{why}. {guard_advice(kwargs, rows)}"
        for name, value in kwargs.items():
            if name in media.starts or name in CALLBACK_NAMES or name in self.taken:
                continue
            known = (
                self.is_cut(name) and isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)
            )
            if name == "position_ids" and known and value.dim() > 2:
                # Some models have an axis of three before the rows.
                known = False
            if not known and holds_tensors(value):
                why = f"the argument {name} is not known to hold one row per input"
                return f"{why}. {guard_advice(kwargs, rows)}"
            if isinstance(value, (list, tuple)) and not is_of_all_rows(
                self.model, name, value, rows
            ):
                return f"the argument {name} has {len(value)} entries for {rows} rows"
        tokens = None
        if self.prompt_tokens is not None and self.max_new_tokens is not None:
            tokens = self.prompt_tokens + self.max_new_tokens
        return why_rows_depend(self.model, "generate", self.given(), rows, tokens)

    @property
    def max_new_tokens(self) -> int | None:
        """New tokens that the call may generate; None if unknown."""
        return new_tokens(self.model, self.args, self.kwargs, self.prompt_tokens)

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop``, with their padding.

        With another padding a model could give other tokens.
        """
        import torch

        media = self.media()
        assert isinstance(media, Media)  # noqa: S101 - not_splittable has checked it
        args = list(self.args)
        # The first positional argument is the main input; later ones are options.
        if args and isinstance(args[0], torch.Tensor):
            args[0] = args[0][start:stop]
        kwargs = {}
        for name, value in self.kwargs.items():
            # Media are cut by their own starts, because a row may have several images or none.
            if name in media.starts:
                continue
            is_rows = isinstance(value, torch.Tensor) and self.is_cut(name)
            is_row_list = isinstance(value, (list, tuple)) and name in ROW_LISTS
            if is_rows or is_row_list:
                kwargs[name] = value[start:stop]
            else:
                kwargs[name] = value
        return tuple(args), {**kwargs, **media.given_to(self.kwargs, start, stop)}

    def media(self) -> Media | str:
        """Return the rows of images and videos, or why they are unknown."""
        main = main_input(self.model, self.args, self.kwargs)
        others = {}
        for name, value in self.kwargs.items():
            if value is not main:
                others[name] = value
        return media_of(self.model, others, main)

    @property
    def puts_back(self) -> Collection[str]:
        """The user's cache, if the entries that a call adds can be removed."""
        if self.began.cache_tokens is not None:
            return CACHE_NAMES
        return ()

    @property
    def taken(self) -> frozenset[str]:
        """Unlisted tensors that are split because they have one entry per row."""
        media = self.media()
        if isinstance(media, str) or media.starts or is_overridden(self.model):
            return frozenset()
        # Generation options such as end tokens may have as many entries as there are rows.
        options = getattr(self.model, "generation_config", None)
        unknown = {}
        for name, value in self.kwargs.items():
            if is_tensor(value) and not self._is_listed(name) and not hasattr(options, name):
                unknown[name] = value
        return infer_row_arguments(unknown, self.rows, media.unmarked)

    def is_cut(self, name: str) -> bool:
        """Return whether a tensor with this name is split into rows."""
        return self._is_listed(name) or name in self.taken

    def _is_listed(self, name: str) -> bool:
        return is_row_argument(name) or name == main_name(self.model, self.args, self.kwargs)

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why a part's result cannot be joined to the others; None if it can."""
        import torch

        if self.draws.problem is not None:
            return self.draws.problem
        if self.gives_record and isinstance(part, Mapping):
            # Collecting the results checks every field.
            return None
        if isinstance(part, torch.Tensor) and part.dim() == 2 and part.shape[0] % rows == 0:
            return None
        return f"generate returned a {type(part).__name__} that is not one row of tokens per input"

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the tokens of some rows, with the part of their prompts that was left out."""
        if self.left_out is None:
            return result
        return with_left_out(self.left_out, result, start, stop)

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the tokens of all rows as the whole call would return them."""
        del place
        if self.gives_record:
            return number_beams(result, self.rows, int(self.option("num_beams") or 1))
        return result

    @property
    def weigh(self) -> Callable[[Any, int, int], None] | None:
        """A function if the result is a record of fields, whose entries have no mean to weigh."""
        if self.gives_record:
            return no_weight
        return None

    @property
    def several(self) -> Collection[int]:
        """Other numbers of entries per row in a result field: its beams or its sequences."""
        numbers = {int(self.option(name) or 1) for name in ("num_beams", "num_return_sequences")}
        return numbers - {1}

    @property
    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Empty: the fields of a record are known."""
        return {}

    @property
    def gives_record(self) -> bool:
        """Whether the result is a record of fields."""
        return any(self.option(name) for name in _RECORDS)

    def option(self, name: str) -> Any:
        """Return an option of the call as transformers resolves it."""
        return option_of(self.model, self.args, self.kwargs, name)

    @property
    def pad_value(self) -> int | None:
        """The token that follows a row which ended early; None if all rows end together."""
        criteria = self.kwargs.get(CRITERIA)
        if (
            criteria
            and self.option("eos_token_id") is None
            and not any(hasattr(c, "eos_token_id") for c in criteria)
        ):
            return None
        return (
            *tokens_in(self.option("pad_token_id")),
            *tokens_in(self.option("eos_token_id")),
            0,
        )[0]

    @property
    def waits_on_host(self) -> bool:
        """Whether the result is only tokens."""
        return not self.gives_record

    @property
    def estimated_row_bytes(self) -> int | None:
        """Bytes that one row needs by a formula; None if no formula applies."""
        if self.attention is not None or self.cache_on_host or self.chunk_tokens is not None:
            return None
        # `generate` runs a row once for each beam or returned sequence, whichever are more.
        returned = int(self.option("num_return_sequences") or 1)
        sequences = max(returned, int(self.option("num_beams") or 1))
        return estimate_row_bytes(
            self.model, self.prompt_tokens, self.max_new_tokens, sequences=sequences
        )

    def given(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return by_name(self.model, self.args, self.kwargs)
