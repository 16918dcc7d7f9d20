"""Compile patterns of signatures: they match wrapped lines, and groups are facts."""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import functools
import hashlib
import marshal
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import RuleError, SettingError
from oomguard.core.facts import GIB, REGISTRY, Fact, coerce
from oomguard.core.files import cache_file, read_regular, state_of, write_cache
from oomguard.rules.expressions import suggestion

# Compiling a pattern with large repetitions may never end, so oomguard computes its size first.
#
# The library compiles ``(?:abc){99999999}`` by copying its part, and no time limit applies there.
# This code reads the text with the library's own grammar (version 0) and refuses flags that would
# change it.

# Far more than needed: a window of a log has some 6000 characters.
MAX_REPEATED_CHARS: Final = 20_000

# Compiled with the first pattern. If all patterns come from the cache, it is not needed.
_GRAMMAR: Final = r"""
      (?P<escape>\\.)
    | (?P<set>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*+\])
    | (?P<comment>\(\?\#[^)]*\))
    | (?P<flags>\(\?[A-Za-z0-9]*+(?:-[A-Za-z]*+)?[:)])
    | (?P<open>\()
    | (?P<close>\))
    | (?P<repeat>\{(?=[^}]*[0-9])[0-9\s]*(?:,[0-9\s]*)?\})
    | .
    """


def too_much_repetition(text: str) -> tuple[int, str] | None:
    """Return the position and reason why a pattern is too long or unreadable, or None if it is
    fine.
    """
    totals, last = [0], 0  # the length of each open group so far, and of the last part
    for token in re.finditer(_GRAMMAR, text, re.VERBOSE | re.DOTALL):
        if token.lastgroup == "flags" and re.search(r"x|V1", token.group()):
            return token.start(), "the flags x and V1 are not allowed here"
        opens = token.lastgroup == "open" or (
            token.lastgroup == "flags" and token.group().endswith(":")
        )
        if opens:
            totals.append(0)
        elif token.lastgroup == "close" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif token.lastgroup == "repeat":
            longer = last * _most(token.group())
            totals[-1] += longer - last
            last = longer
            if sum(totals) > MAX_REPEATED_CHARS:
                return (
                    token.start(),
                    f"longer than {MAX_REPEATED_CHARS} characters with its repetitions written out",
                )
        elif token.lastgroup not in {"comment", "flags"}:
            last = 1
            totals[-1] += last
    return None


def _most(quantifier: str) -> int:
    """Return how often ``{3}``, ``{3,5}`` or ``{3,}`` repeats its part.

    It is the maximum, or the minimum without a maximum.
    """
    counts = [part for part in re.sub(r"\s", "", quantifier.strip("{}")).split(",") if part]
    return max(1, *(int(count) if len(count) < 10 else 10**9 for count in counts))


# A short log needs a few dozen of the shipped patterns, and compiling each takes a millisecond. So
# patterns compile on first use.
#
# That applies to shipped patterns only, which a test checks. A user's pattern is compiled and
# checked when loaded.


@functools.cache
def _kept() -> PatternCache:

    return PatternCache()


class LazyPattern:
    """Compile a pattern on first use, with the methods that the scanner needs."""

    __slots__ = ("_compiled", "pattern")

    def __init__(
        self, text: str, *, path: str, key: str
    ) -> None:  # for the messages of ``compile_pattern``
        self.pattern = text
        self._compiled: Any = None

    @property
    def compiled(self) -> Any:
        """Return the compiled pattern."""
        if self._compiled is None:
            self._compiled = _kept().compiled(self.pattern)
        return self._compiled

    @property
    def groupindex(self) -> dict[str, int]:
        """Return the named groups and their numbers."""
        return dict(self.compiled.groupindex)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first match or None; the arguments are the same as for ``Pattern.search``."""
        return self.compiled.search(*args, **kwargs)

    def finditer(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return all matches; the arguments are the same as for ``Pattern.finditer``."""
        matches: Iterator[Any] = self.compiled.finditer(*args, **kwargs)
        return matches


MAX_PATTERN_CHARS: Final = 4000
_DECIMAL: Final = "_decimal_gb"

# ``{size}`` in a pattern is a size with its unit in any engine's form. It only matches from the
# first digit, so a long row of digits is tried once. In scripts without spaces text follows the
# unit directly.
SIZE: Final = (
    r"-?(?<!\d,?)\d[\d,]*(?:\.\d+|\.(?=\s[KMGT]i?B))?"
    r"(?:(?:\s?|\n\x20{1,12})(?:[KMGTPE]i?B|[KMGT]b?|bytes|byte|B)(?![A-Za-z\d_]))?"
)


def compile_pattern(text: str, *, path: str, key: str) -> Any:
    """Compile a pattern of a signature.

    A plain space matches any white space, so that wrapped lines match too. ``{size}`` is a number
    with its unit ("24.56 MiB", "1000000"). A group has the name of its fact (see ``group_fact``),
    or begins with ``_``.

    Args:
        text: the pattern as its author wrote it.
        path: the file, for messages.
        key: the dotted path of the pattern in the file, for messages.

    Raises:
        RuleError: with the column of the mistake in the author's own text.
    """
    import regex

    if len(text) > MAX_PATTERN_CHARS:
        raise RuleError(f"pattern longer than {MAX_PATTERN_CHARS} characters", path=path, key=key)
    written = text
    text = text.replace("{size}", SIZE)
    refusal = too_much_repetition(text)
    if refusal is not None:
        raise RuleError(
            f"not a pattern: {refusal[1]}", path=path, key=key, column=_column(written, refusal[0])
        )
    mistakes = (regex.error, ValueError, RecursionError, OverflowError, MemoryError)
    try:
        compiled = trusted_pattern(text)
    except mistakes as flexible_error:
        found = flexible_error
        position = None
        try:
            regex.compile(text)  # in the original form, so that columns are the author's
        except mistakes as own_error:
            found = own_error
            position = getattr(own_error, "pos", None)
        if position is None:
            column = None
        else:
            column = _column(written, position)
        raise RuleError(
            f"not a pattern: {getattr(found, 'msg', found)}", path=path, key=key, column=column
        ) from None
    for group in compiled.groupindex:
        if group_fact(group) is None and not group.startswith("_"):
            hint = suggestion(group, REGISTRY)
            raise RuleError(f"the group {group!r} is not a fact", path=path, key=key, hint=hint)
    return compiled


def trusted_pattern(text: str) -> Any:
    """Compile a shipped pattern without the checks of ``compile_pattern``; a test does them."""
    import regex

    return regex.compile(_flexible_spaces(text.replace("{size}", SIZE)))


def group_fact(group: str) -> str | None:
    """Return the fact of a named group, or None if it has none.

    Several group names fill the fact ``tried_bytes``: ``tried_bytes`` (bytes), ``tried`` (a size
    with its unit), ``tried_gib`` (a number in GiB), ``tried_kib`` (a number in KiB) and
    ``tried_decimal_gb`` (a number in 10^9 bytes). A trailing ``__2`` fills the same fact from a
    second group of the pattern.
    """
    group = re.sub(r"__\d+\Z", "", group)
    if group in REGISTRY:
        return group
    name = f"{group.removesuffix('_gib').removesuffix('_kib').removesuffix(_DECIMAL)}_bytes"
    if name in REGISTRY:
        return name
    return None


def group_value(group: str, text: str) -> Fact:
    """Return the fact in a captured group.

    Raises:
        SettingError: the text does not have the fact's type.
    """
    name = group_fact(group)
    if name is None:
        raise SettingError(f"the group {group!r} is not a fact")
    # Two special forms: numpy's "306. GiB" and Kubernetes' "41Gi".
    text = re.sub(r"(\d[KMGT]i)\Z", r"\1B", re.sub(r"(?<=\d)\.(?=\s)", "", text))
    unit = re.sub(r"__\d+\Z", "", group)
    if (
        name != unit
        and name.endswith("_bytes")
        and not unit.endswith(("_gib", _DECIMAL))
        and _is_cut(text)
    ):
        raise SettingError(f"{text} has no unit")
    if unit.endswith(_DECIMAL):
        fact = coerce(name, f"{text} GiB")
        return replace(fact, value=round(float(text) * 10**9), slack=fact.slack * 10**9 / GIB)
    for suffix, words in (("_gib", "GiB"), ("_kib", "KiB")):
        if unit.endswith(suffix):
            text = f"{text} {words}"
    return coerce(name, text)


def _is_cut(size: str) -> bool:
    """Return whether a size has lost its unit: nothing prints so few bytes."""
    return re.fullmatch(r"-?\d+\.\d*|-?\d{1,3}", size) is not None


def _column(written: str, position: int) -> int:
    """Return the 1-based column in the author's pattern from a position in the expanded text."""
    at = 0
    for part in re.split(r"(\{size\})", written):
        if part == "{size}":
            length = len(SIZE)
        else:
            length = len(part)
        if position < length:
            return at + 1 + (0 if part == "{size}" else position)
        position -= length
        at += len(part)
    return len(written) + 1


def _flexible_spaces(text: str) -> str:
    out = []
    in_class = False
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\\" and i + 1 < len(text):
            escaped = text[i : i + 2]
            out.append(r"\s+" if escaped == "\\ " and not in_class else escaped)
            i += 2
            continue
        if char == "[":
            in_class = True
        elif char == "]":
            in_class = False
        if char == " " and not in_class:
            quantifier = text[i + 1 : i + 2]
            out.append(r"\s*" if quantifier in {"?", "*"} else r"\s+")
            i += 1 + (quantifier != "" and quantifier in "?*+")
            continue
        out.append(char)
        i += 1
    return "".join(out)


# Compiling the patterns for a short log takes longer than reading it, so a cache in the user's
# folder stores them.
#
# The cache has the same data as ``pickle`` would have, but never as a pickle, so reading it runs
# nothing. oomguard ignores a cache of another version of Python, ``regex`` or these rules, and a
# damaged one.

_MAX_KEPT_BYTES: Final = 16 << 20
_DIGEST_BYTES: Final = 32


class PatternCache:
    """Cache compiled patterns by their text; save all when the program ends."""

    def __init__(self) -> None:
        import regex

        self._make, _ = _parts(regex.compile(""))
        own = state_of(Path(__file__))
        self._path = cache_file(
            "patterns-{}.bin", [sys.version.encode(), regex.__version__.encode(), own]
        )
        self._kept = _read(self._path)
        self._grew = False

    def compiled(self, text: str) -> Any:
        """Return a compiled pattern for a text that ``trusted_pattern`` accepts."""
        kept = self._kept.get(text)
        if kept is not None:
            # if the library rejects cached data, compile again
            with contextlib.suppress(Exception):
                # of the user's own folder, as bytecode is
                return self._make(*marshal.loads(kept))  # noqa: S302
        made = trusted_pattern(text)
        if not self._grew:
            self._grew = True
            atexit.register(self._keep)
        self._kept[text] = marshal.dumps(_parts(made)[1])
        return made

    def _keep(self) -> None:
        content = marshal.dumps({**_read(self._path), **self._kept})
        write_cache(self._path, hashlib.sha256(content).digest() + content)


def _parts(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the constructor and arguments of a compiled pattern, as ``pickle`` would store it."""
    return copyreg.dispatch_table[type(compiled)](compiled)  # type: ignore[return-value]


def _read(path: Path) -> dict[str, bytes]:
    """Return the cached patterns, or nothing if the file is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        content = read_regular(path, _MAX_KEPT_BYTES)
        digest = content[:_DIGEST_BYTES]
        content = content[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return dict(marshal.loads(content))  # noqa: S302 - whole, and of the user's own folder
    return {}
