"""The modules that a quantised checkpoint names, as left alone or as one of a group: names, globs and patterns of a stranger."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Final

from oomguard.errors import ConfigError
from oomguard.memory.model.json_file import shown

# Published files have a handful of patterns; each is tried on every module.
_MOST_PATTERNS: Final = 500
_MOST_PATTERN_CHARS: Final = 1000
# Processor time of all patterns of one model together.
_SEARCH_LIMIT_S: Final = 2.0
_REGULAR: Final = "re:"
# Files and engines call the decoder otherwise: backbone.layers.4, model.language_model.layers.4, model.layers.4.
_DECODER: Final = re.compile(r"^(?:(?:model|backbone|language_model|transformer)\.)+(?=layers\.\d)")


class ModuleNames:
    """Some modules, by what the configuration says of them; what a model calls its decoder before the layers does not count.

    Args:
        said: names of modules, globs, and patterns that begin with ``re:``.

    Raises:
        ConfigError: there are more patterns than any model needs, or one of them is too long.
    """

    def __init__(self, said: Iterable[str] = ()) -> None:
        entries = tuple(_DECODER.sub("", entry) for entry in said)
        self._patterns = tuple(dict.fromkeys(entry for entry in entries if _is_pattern(entry)))
        self._names = frozenset(entry for entry in entries if not _is_pattern(entry))
        self._lengths = frozenset(name.count(".") + 1 for name in self._names)
        if len(self._patterns) > _MOST_PATTERNS:
            raise ConfigError(
                f"quantization_config has {len(self._patterns)} patterns, at most {_MOST_PATTERNS} are read"
            )
        too_long = next((entry for entry in self._patterns if len(entry) > _MOST_PATTERN_CHARS), None)
        if too_long is not None:
            raise ConfigError(f"quantization_config has the pattern {shown(too_long)} of {len(too_long)} characters")
        self._spent_s = 0.0

    def has(self, module: str) -> bool:
        """Whether a module, or one that it lies in, is one of them; raises ConfigError where the patterns take too long."""
        parts = _DECODER.sub("", module).split(".")
        runs = (parts[i : i + length] for length in self._lengths for i in range(len(parts) - length + 1))
        if any(".".join(run) in self._names for run in runs):
            return True
        began = time.thread_time()
        try:
            return any(matches(module) for matches in self._compiled)
        except TimeoutError:
            raise _too_slow() from None
        finally:
            self._spent_s += time.thread_time() - began
            if self._spent_s > _SEARCH_LIMIT_S:
                raise _too_slow()

    @cached_property
    def _compiled(self) -> tuple[Callable[[str], Any], ...]:
        return tuple(found for found in map(_matcher, self._patterns) if found is not None)


def _is_pattern(entry: str) -> bool:
    return entry.startswith(_REGULAR) or "*" in entry


def _too_slow() -> ConfigError:
    return ConfigError(
        f"quantization_config has patterns that take more than {_SEARCH_LIMIT_S:g} s on the model's modules"
    )


def _matcher(entry: str) -> Callable[[str], Any] | None:
    """Return what tells whether a module matches a pattern; None for an invalid one, as the engines ignore it."""
    if not entry.startswith(_REGULAR):
        return re.compile(fnmatch.translate(entry)).match
    import regex

    from oomguard.rules.repetition import too_much_repetition

    text = entry.removeprefix(_REGULAR)
    if too_much_repetition(text) is not None:
        return None
    try:
        compiled = regex.compile(text)
    except (regex.error, ValueError, RecursionError, OverflowError, MemoryError):
        return None
    return lambda module: compiled.match(module, timeout=_SEARCH_LIMIT_S)
