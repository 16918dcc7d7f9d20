"""A module of sentence-transformers that runs a model on a dict of features, and gives the dict back with what it found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from oomguard.engines.transformers.forward import ForwardCall
from oomguard.engines.transformers.loss import no_weight
from oomguard.engines.transformers.tensors import is_tensor
from oomguard.facts import FactValue


@dataclass(frozen=True, slots=True)
class FeaturesCall:
    """One call of such a module; ``features`` is the call of its model that they amount to."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    features: ForwardCall
    why_not_rows: str | None
    estimated_row_bytes: int | None = None
    waits_on_host: bool = False
    pad_value: int | None = None
    puts_back: Collection[str] = ()
    phase: str | None = None
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FeaturesCall:
        """Read a call."""
        model = getattr(module, "auto_model", None) or module.model
        given = args[0] if args else kwargs.get("features")
        tensors = {name: value for name, value in dict(given or {}).items() if is_tensor(value)}
        features = ForwardCall.of(model, (), tensors)
        known = len(args) == 1 and isinstance(given, Mapping) and not any(map(is_tensor, kwargs.values()))
        return cls(args, kwargs, features, None if known else "its arguments are not known")

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart; None where they can."""
        return self.why_not_rows or self.features.not_splittable

    @property
    def model(self) -> Any:
        """The model that runs."""
        return self.features.model

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return self.features.rows

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of a row, padding included."""
        return self.features.prompt_tokens

    @property
    def max_new_tokens(self) -> int | None:
        """No tokens are generated."""
        return self.features.max_new_tokens

    @property
    def may_train(self) -> bool:
        """Whether gradients are recorded."""
        return self.features.may_train

    @property
    def several(self) -> Collection[int]:
        """How many entries a row may have in a field beside one: no other number."""
        return ()

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None]:
        """What a mean over rows weighs: the result is a record of fields, none of which is known to be one."""
        return no_weight

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with rows ``start`` to ``stop`` of each feature."""
        _, cut = self.features.part(start, stop)
        given = self.args[0]
        return (type(given)({**given, **cut}),), dict(self.kwargs)

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return what notes whether the model draws: rows are cut, and nothing else."""
        return self.features.around(start, stop)

    def varied(self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None) -> str:
        """Return why nothing of it is done another way."""
        del changes, failed_in
        return "no cache holds the prompt"

    def problem(self, part: Any, rows: int) -> str | None:
        """Return None: every field of a part's result is looked at where it is put."""
        return self.features.problem(part, rows)

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return a result as it is: nothing was left out."""
        del start, stop
        return result

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result as it is put together."""
        del place
        return result
