"""Patterns of signatures: compiled so that wrapped lines match, their groups named after facts."""

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

# How long a pattern gets once its repetitions are written out: known before compiling it, which may
# never end.
#
# The library compiles ``(?:abc){99999999}`` by copying its part, and no time limit holds there. The
# text is read by the library's own grammar (version 0); flags that would change that grammar are
# refused.

# Far beyond any need: a window of a log has some 6000 characters.
MAX_REPEATED_CHARS: Final = 20_000

# Compiled when the first pattern is: where all of them lie compiled in the cache, none is read.
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
    """Return position and reason of what makes a pattern too long or unreadable here; None if it
    may be compiled.
    """
    totals, last = [0], 0  # the length so far of each open group; the length of the part just read
    for token in re.finditer(_GRAMMAR, text, re.VERBOSE | re.DOTALL):
        if token.lastgroup == "flags" and re.search(r"x|V1", token.group()):
            return token.start(), "the flags x and V1 are not known here"
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
    """Return how often ``{3}``, ``{3,5}`` or ``{3,}`` repeats its part: at most, or at least if it
    has no upper end.
    """
    counts = [part for part in re.sub(r"\s", "", quantifier.strip("{}")).split(",") if part]
    return max(1, *(int(count) if len(count) < 10 else 10**9 for count in counts))


# A pattern made ready on first use: a short log needs a few dozen of the shipped patterns, and
# compiling one takes a millisecond.
#
# Only shipped patterns wait, and a test checks all of them; a user's pattern is compiled and
# checked at load.


@functools.cache
def _kept() -> KeptPatterns:

    return KeptPatterns()


class LazyPattern:
    """What the scanner uses of a compiled pattern."""

    __slots__ = ("_compiled", "pattern")

    def __init__(
        self, text: str, *, path: str, key: str
    ) -> None:  # as ``compile_pattern`` takes them, for its messages
        self.pattern = text
        self._compiled: Any = None

    @property
    def compiled(self) -> Any:
        """The compiled pattern."""
        if self._compiled is None:
            self._compiled = _kept().compiled(self.pattern)
        return self._compiled

    @property
    def groupindex(self) -> dict[str, int]:
        """Named groups and their numbers."""
        return dict(self.compiled.groupindex)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first match, None if there is no match; the arguments are those of
        ``Pattern.search``.
        """
        return self.compiled.search(*args, **kwargs)

    def finditer(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return all matches; the arguments are those of ``Pattern.finditer``."""
        matches: Iterator[Any] = self.compiled.finditer(*args, **kwargs)
        return matches


MAX_PATTERN_CHARS: Final = 4000
_DECIMAL: Final = "_decimal_gb"

# What ``{size}`` in a pattern stands for: a size with its unit, as any engine prints it. It begins
# where its digits begin, so that a long row of digits is tried once and not again from each digit.
# Scripts without spaces go on right behind the unit.
SIZE: Final = (
    r"-?(?<!\d,?)\d[\d,]*(?:\.\d+|\.(?=\s[KMGT]i?B))?"
    r"(?:(?:\s?|\n\x20{1,12})(?:[KMGTPE]i?B|[KMGT]b?|bytes|byte|B)(?![A-Za-z\d_]))?"
)


def compile_pattern(text: str, *, path: str, key: str) -> Any:
    """Compile a pattern of a signature.

    A plain space matches any white space, so that wrapped lines match too. ``{size}`` stands for a
    number and its unit ("24.56 MiB", "1000000"). A group is named after the fact it fills (see
    ``group_fact``), or begins with ``_``.

    Args:
        text: the pattern as its author wrote it.
        path: the file, for messages.
        key: the dotted path of the pattern inside the file, for messages.

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
            regex.compile(
                text
            )  # as it was written, so that the column of a mistake is the author's
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
            raise RuleError(f"the group {group!r} is no fact", path=path, key=key, hint=hint)
    return compiled


def trusted_pattern(text: str) -> Any:
    """Compile a pattern that ``compile_pattern`` takes, without its checks: for the shipped ones,
    which a test checks.
    """
    import regex

    return regex.compile(_flexible_spaces(text.replace("{size}", SIZE)))


def group_fact(group: str) -> str | None:
    """Return the fact that a named group fills, None if it names none.

    The fact ``tried_bytes`` is filled by the groups ``tried_bytes`` (bytes), ``tried`` (a size with
    its unit), ``tried_gib`` (a bare figure in GiB), ``tried_kib`` (one in KiB) and
    ``tried_decimal_gb`` (one in 10^9 bytes). A trailing ``__2`` fills the same fact from a second
    place of the pattern.
    """
    group = re.sub(r"__\d+\Z", "", group)
    if group in REGISTRY:
        return group
    name = f"{group.removesuffix('_gib').removesuffix('_kib').removesuffix(_DECIMAL)}_bytes"
    if name in REGISTRY:
        return name
    return None


def group_value(group: str, text: str) -> Fact:
    """Return the fact that a captured group tells; raises SettingError for a text that is not of
    the fact's type.
    """
    name = group_fact(group)
    if name is None:
        raise SettingError(f"the group {group!r} is no fact")
    # numpy's "306. GiB", Kubernetes' "41Gi"
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
    """Return whether a size has lost its unit: bytes are whole numbers, and nobody prints so few of
    them.
    """
    return re.fullmatch(r"-?\d+\.\d*|-?\d{1,3}", size) is not None


def _column(written: str, position: int) -> int:
    """Return the 1-based column in the author's pattern, from a position in the text with
    ``{size}`` written out.
    """
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


# Compiled patterns, kept in the user's cache folder: compiling those that a short log needs takes
# longer than reading it.
#
# What is kept is what ``pickle`` would keep of a pattern, as data and never as a pickle: reading it
# runs nothing. It is ignored where it was kept by another version of Python or of ``regex``, by
# other rules for writing patterns, or is damaged.

_MAX_KEPT_BYTES: Final = 16 << 20
_DIGEST_BYTES: Final = 32


class KeptPatterns:
    """Patterns by their text; those that were not kept yet are compiled, and all are kept when the
    program ends.
    """

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
        """Return a pattern that ``trusted_pattern`` takes, compiled."""
        kept = self._kept.get(text)
        if kept is not None:
            with contextlib.suppress(Exception):  # what the library does not take is compiled again
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
    """Return what makes a compiled pattern again, and from what: as ``pickle`` asks for it."""
    return copyreg.dispatch_table[type(compiled)](compiled)  # type: ignore[return-value]


def _read(path: Path) -> dict[str, bytes]:
    """Return what is kept; nothing where there is no such file, or it is not whole."""
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        content = read_regular(path, _MAX_KEPT_BYTES)
        digest = content[:_DIGEST_BYTES]
        content = content[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return dict(marshal.loads(content))  # noqa: S302 - whole, and of the user's own folder
    return {}
