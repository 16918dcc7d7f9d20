"""``generate`` of Hugging Face transformers: watching it, and running it in parts that give the
same rows in order.
"""

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
from oomguard.engines.transformers.call_state import Began, put_together
from oomguard.engines.transformers.chunked_forward import chunking
from oomguard.engines.transformers.generate_variants import (
    as_changed,
    generate_another_way,
    with_left_out,
)
from oomguard.engines.transformers.independence import (
    CRITERIA,
    NAMES,
    line_to_write,
    taken_for_rows,
    why_not_apart,
    why_rows_depend,
)
from oomguard.engines.transformers.inputs import NAMES as CACHES
from oomguard.engines.transformers.inputs import (
    by_name,
    given_cache,
    holds_tensors,
    inputs_of,
    is_tensor,
    main_name,
    new_tokens,
    option_of,
    rows_and_tokens,
    tokens_in,
)
from oomguard.engines.transformers.loss import no_weight
from oomguard.engines.transformers.media import Media, media_of
from oomguard.estimate.call.call_budget import generate_row_bytes
from oomguard.estimate.model.shape import read_shape

if TYPE_CHECKING:
    from oomguard.engines.transformers.random_draws import Draws


# Whose beam each token of a sequence came from, in the record of a search that ran in parts: beams
# are numbered over the whole batch.

_FIELD = "beam_indices"


def number_beams(record: Any, rows: int, beams: int) -> Any:
    """Return a record whose beams are numbered as in one call of ``rows`` rows: the parts began
    each with 0.

    Beam ``b`` of row ``r`` has the number ``r * beams + b``; what stands behind the end of a
    sequence is negative.
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


# Whether what ``generate`` gives of a model has one row per input, as the model itself tells before
# anything runs.

# Arguments that hold one text per row where they are a list of as many.
ROW_LISTS: Final = frozenset({"adapter_names", "language"})
# Arguments that see the whole batch, or count its rows.
UNSPLITTABLE: Final = (
    "streamer",
    *CACHES,
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
    """Return whether an argument of this name is known to hold one row per input."""
    return name in _row_arguments()


def is_overridden(model: Any) -> bool:
    """Return whether a model's ``generate`` is not that of transformers."""
    owner = next((base for base in type(model).__mro__ if "generate" in vars(base)), None)
    return owner is not None and owner.__module__ != "transformers.generation.utils"


def why_not_rows(model: Any) -> str | None:
    """Return why what a model generates is not one row of tokens per input, or not the same in
    parts; None where nothing tells.
    """
    gives = getattr(model, "output_modalities", None) or (_TEXT,)
    if is_overridden(model) and _TEXT not in gives:
        return (
            f"generate of {type(model).__name__} gives {' and '.join(map(str, gives))}, not one "
            "row of tokens per input"
        )
    return None


def is_of_all_rows(model: Any, name: str, value: Sequence[Any], rows: int) -> bool:
    """Return whether a list may be handed to a part: it is one text a row and cut, an option of
    generation, or no list of rows.
    """
    if name in ROW_LISTS:
        return len(value) == rows
    return (
        rows == 1 or len(value) != rows or hasattr(getattr(model, "generation_config", None), name)
    )


# What one row of a call needs in closed form, from the model's configuration alone.


def estimate_row_bytes(
    model: Any, prompt_tokens: int | None, max_new_tokens: int | None, *, sequences: int = 1
) -> int | None:
    """Return the bytes that one row of ``generate`` needs beyond the weights; None if no closed
    form holds.

    Args:
        model: the model; its configuration is read, and nothing else.
        prompt_tokens: tokens of the prompt, padding included.
        max_new_tokens: tokens that the call may generate.
        sequences: beams, or sequences that are returned for a row.
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
    except (OomguardError, TypeError, ValueError):
        return None


# Options that make the result a record of fields.
_RECORDS: Final = ("return_dict_in_generate", "return_token_timestamps")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One call of ``generate``: its rows and lengths, and how to make a part of it and put parts
    together again.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int
    prompt_tokens: int | None
    draws: Draws
    began: Began
    may_train: bool = False
    phase: str | None = "generate"
    chunk_tokens: int | None = (
        None  # of every call of its model, where generate itself knows no chunks
    )
    attention: str | None = (
        None  # the implementation by which its model attends while it runs; None: its own
    )
    cache_on_host: bool = (
        False  # whether the layers of its cache are on the host until they are needed
    )
    left_out: Any = None  # tokens of the prompts that it does not read; None: it reads all
    left: dict[int, list[tuple[Any, str, Any]]] = field(
        default_factory=dict
    )  # on its model, by each part that ran

    @classmethod
    def of(
        cls,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        began: Began | None = None,
    ) -> GenerateCall:
        """Read a call, no more of it than a call that succeeds has use for; ``began`` is what
        ``begin`` found before it was made.
        """
        from oomguard.engines.transformers.random_draws import Draws

        rows, prompt_tokens = rows_and_tokens(model, args, kwargs)
        # A method of its own around generation (Whisper's) draws again for some of the rows.
        if began is None:
            began = cls.begin(model, args, kwargs)
        began.restore_layers(model)
        draws = Draws(began.states, rows, may_draw=not is_overridden(model))
        return cls(model, args, kwargs, rows, prompt_tokens, draws, began)

    @staticmethod
    def begin(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Began:
        """Note what a call will change beside its result."""
        return Began.now(model, inputs_of(model, args, kwargs), given_cache(kwargs))

    @contextlib.contextmanager
    def around(self, start: int, stop: int) -> Iterator[None]:
        """Have rows ``start`` to ``stop`` draw what the whole call would have drawn for them, with
        what it would have found.
        """
        self.began.restore(self.kwargs)
        self.began.restore_layers(self.model)
        with self.draws.of_rows(start, stop), contextlib.ExitStack() as stack:
            stack.callback(self.began.restore_layers, self.model)
            for model in (self.model, self.kwargs.get("assistant_model")):
                if self.chunk_tokens is not None and model is not None:
                    stack.enter_context(chunking(model, self.chunk_tokens))
            stack.enter_context(self.changed(self.model))
            stack.enter_context(put_together(self.model, self.left, start, self.rows - stop))
            yield

    def changed(self, model: Any) -> AbstractContextManager[None]:
        """Return what has a model's calls run the way that this one runs."""
        return as_changed(model, self.attention, cache_is_on_host=self.cache_on_host)

    def varied(
        self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
    ) -> GenerateCall | str:
        """Return the call with these settings changed, or why it cannot be made so."""
        return generate_another_way(self, changes, failed_in)

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart, None where they can."""
        import torch

        args = self.args
        kwargs = self.kwargs
        rows = self.rows
        main = inputs_of(self.model, args, kwargs)
        if not isinstance(main, torch.Tensor) or main.dim() < 2:
            return "no rows to split: the call has no tensor of inputs"
        if (why := why_not_rows(self.model)) is not None:
            return why
        if self.gives_record and self.several and is_overridden(self.model):
            return (
                "return_dict_in_generate with several rows for each input: whose they are is not "
                "known"
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
            return f"{media}. {line_to_write(kwargs, rows)}"
        if (why := why_not_apart(kwargs)) is not None:
            return f"{why}. {line_to_write(kwargs, rows)}"
        for name, value in kwargs.items():
            if name in media.starts or name in NAMES or name in self.taken:
                continue
            known = (
                self.is_cut(name) and isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)
            )
            if name == "position_ids" and known and value.dim() > 2:
                known = False  # some models put an axis of three before the rows
            if not known and holds_tensors(value):
                why = f"the argument {name} is not known to hold one row per input"
                return f"{why}. {line_to_write(kwargs, rows)}"
            if isinstance(value, (list, tuple)) and not is_of_all_rows(
                self.model, name, value, rows
            ):
                return f"the argument {name} has {len(value)} entries for {rows} rows"
        new = self.max_new_tokens
        if self.prompt_tokens is None or new is None:
            tokens = None
        else:
            tokens = self.prompt_tokens + new
        return why_rows_depend(self.model, "generate", self.given(), rows, tokens)

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens that the call may generate, None where that is not known."""
        return new_tokens(self.model, self.args, self.kwargs, self.prompt_tokens)

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop``, padding columns included, so that
        tokens stay the same.
        """
        import torch

        media = self.media()
        assert isinstance(media, Media)  # noqa: S101 - a call that is split has media of known rows
        args = tuple(
            a[start:stop] if i == 0 and isinstance(a, torch.Tensor) else a
            for i, a in enumerate(self.args)
        )
        kwargs = {
            n: v[start:stop]
            if (isinstance(v, torch.Tensor) and self.is_cut(n))
            or (isinstance(v, (list, tuple)) and n in ROW_LISTS)
            else v
            for n, v in self.kwargs.items()
            if n not in media.starts
        }
        return args, {**kwargs, **media.given_to(self.kwargs, start, stop)}

    def media(self) -> Media | str:
        """Return whose the images and videos beside the text are, or why that cannot be told."""
        main = inputs_of(self.model, self.args, self.kwargs)
        return media_of(self.model, {n: v for n, v in self.kwargs.items() if v is not main}, main)

    @property
    def puts_back(self) -> Collection[str]:
        """The cache that the user gave, where what a call adds to it is known."""
        if self.began.cache_tokens is not None:
            return CACHES
        return ()

    @property
    def taken(self) -> frozenset[str]:
        """The tensors that are taken for one row per input, though nobody has listed them."""
        media = self.media()
        if isinstance(media, str) or media.starts or is_overridden(self.model):
            return frozenset()
        unknown = {name: value for name, value in self.kwargs.items() if is_tensor(value)}
        options = getattr(
            self.model, "generation_config", None
        )  # tokens that end rows may be as many as they
        unknown = {
            n: v for n, v in unknown.items() if not self._is_listed(n) and not hasattr(options, n)
        }
        return taken_for_rows(unknown, self.rows, media.untold)

    def is_cut(self, name: str) -> bool:
        """Return whether a tensor of this name has one row per input."""
        return self._is_listed(name) or name in self.taken

    def _is_listed(self, name: str) -> bool:
        return is_row_argument(name) or name == main_name(self.model, self.args, self.kwargs)

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why the result of a part cannot be put together with others; None where it can."""
        import torch

        if self.draws.problem is not None:
            return self.draws.problem
        if self.gives_record and isinstance(part, Mapping):
            return None  # every field of it is looked at where it is put
        if isinstance(part, torch.Tensor) and part.dim() == 2 and part.shape[0] % rows == 0:
            return None
        return f"generate returned a {type(part).__name__} that is not one row of tokens per input"

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the tokens of some rows, behind what their prompts had beside what was read."""
        if self.left_out is None:
            return result
        return with_left_out(self.left_out, result, start, stop)

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the tokens of all rows as the whole call would have ended them."""
        del place
        if self.gives_record:
            return number_beams(result, self.rows, int(self.option("num_beams") or 1))
        return result

    @property
    def weigh(self) -> Callable[[Any, int, int], None] | None:
        """What makes the result a record of fields: with ``return_dict_in_generate`` each has one
        entry a row, step by step.
        """
        if self.gives_record:
            return no_weight
        return None

    @property
    def several(self) -> Collection[int]:
        """How many entries a row may have in a field of the record: its beams, or the sequences
        returned for it.
        """
        numbers = {int(self.option(name) or 1) for name in ("num_beams", "num_return_sequences")}
        return numbers - {1}

    @property
    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Nothing: the fields of a record are known."""
        return {}

    @property
    def gives_record(self) -> bool:
        """Whether the result is a record of fields."""
        return any(self.option(name) for name in _RECORDS)

    def option(self, name: str) -> Any:
        """Return an option of the call, as transformers resolves it."""
        return option_of(self.model, self.args, self.kwargs, name)

    @property
    def pad_value(self) -> int | None:
        """The token after a row that ended earlier than others, as in one batch; None: rows go on
        until the last one ends.
        """
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
        """Whether the result is tokens and nothing else."""
        return not self.gives_record

    @property
    def estimated_row_bytes(self) -> int | None:
        """Bytes that one row needs in closed form; None if no closed form holds."""
        if self.attention is not None or self.cache_on_host or self.chunk_tokens is not None:
            return None
        sequences = max(
            int(self.option(name) or 1) for name in ("num_return_sequences", "num_beams")
        )
        return estimate_row_bytes(
            self.model, self.prompt_tokens, self.max_new_tokens, sequences=sequences
        )

    def given(self) -> dict[str, Any]:
        """Return its arguments by name."""
        return by_name(self.model, self.args, self.kwargs)
