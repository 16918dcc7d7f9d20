"""Read signatures: the messages of engines before and at a failure; one file per message.

A file of quotations describes texts that only quote an error. The first part compiles patterns,
which match wrapped lines and whose groups are facts.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import functools
import hashlib
import marshal
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from oomguard.core.errors import RuleError, SettingError
from oomguard.core.facts import GIB, REGISTRY, Fact, coerce, is_of_type
from oomguard.core.files import cache_file, read_regular, state_of, write_cache
from oomguard.core.incident import KINDS, PHASES
from oomguard.rules.syntax import Table, suggestion

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
        self._kept = _read_cache(self._path)
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
        content = marshal.dumps({**_read_cache(self._path), **self._kept})
        write_cache(self._path, hashlib.sha256(content).digest() + content)


def _parts(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the constructor and arguments of a compiled pattern, as ``pickle`` would store it."""
    return copyreg.dispatch_table[type(compiled)](compiled)  # type: ignore[return-value]


def _read_cache(path: Path) -> dict[str, bytes]:
    """Return the cached patterns, or nothing if the file is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        content = read_regular(path, _MAX_KEPT_BYTES)
        digest = content[:_DIGEST_BYTES]
        content = content[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return dict(marshal.loads(content))  # noqa: S302 - whole, and of the user's own folder
    return {}


# How a line may say that an engine ended; scan/engine_errors.py has the meaning of each.
ENDS: Final = ("died", "failing", "gone", "stopping", "told")
_QUOTATION_PARTS: Final = ("line", "before", "lead", "around", "raw", "above", "below", "page")


class Wording(NamedTuple):
    """Describe one wording of a message: a literal anchor, and a pattern whose groups are facts.

    A ``near`` wording describes only the failure next to it (a traceback's frame); any other
    describes everything that follows. ``starts`` marks an engine's start. A wording may have its
    own kind or framework, because one allocator prints for several devices. ``key`` is the
    pattern's position in its file. ``ends`` is how the line reports the end of its engine; ``role``
    is the only kind of process whose line counts.
    """

    anchor: str
    pattern: Any
    source: str
    versions: str | None = None
    facts: Mapping[str, Any] = MappingProxyType({})
    phase: str | None = None
    near: bool = False
    starts: bool = False
    framework: str | None = None
    kind: str | None = None
    key: str = ""
    ends: str | None = None
    role: str | None = None


class Quotation(NamedTuple):
    """Describe a text that quotes an error without reporting one.

    ``part`` is the text to search:

    - ``line``: the line without its prefix.
    - ``before``: the part of it before the message's own words.
    - ``lead``: the part before the exception's name.
    - ``around``: the line with a null character instead of the message.
    - ``raw``: the line as printed.
    - ``above`` and ``below``: the lines before or after it.
    - ``page``: all of these as printed, with a null character before and after the line.

    A message with ``below_facts`` numbers or more is always a report.
    """

    name: str
    pattern: Any
    part: str
    quoted: tuple[str, ...]
    real: tuple[str, ...]
    below_facts: int = 1000


class Signature(NamedTuple):
    """Describe a printed message: a failure of one kind, or a line with facts (``kind`` is None).

    ``clauses`` are parts of the message that depend on version and platform. Each is searched
    separately after the wording. ``wraps`` lists kinds that this message only passes on; it takes
    over their facts. ``becomes`` maps a phase to the kind that the same words have in it.
    """

    path: str
    kind: str | None
    framework: str
    phase: str
    wordings: tuple[Wording, ...]
    tests: tuple[Mapping[str, Any], ...]
    clauses: tuple[Any, ...] = ()
    wraps: tuple[str, ...] = ()
    becomes: Mapping[str, str] = MappingProxyType({})

    @property
    def name(self) -> str:
        """Return framework and file name, the signature's name in outputs."""
        return f"{self.framework}/{Path(self.path).stem}"


def read_signature(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> Signature:
    """Read one signature file; ``make`` turns a pattern's text into a pattern.

    Raises:
        RuleError: the file has a mistake.
    """
    table = Table(raw, path, "", "signature")
    context = bool(table.get("context", False))
    if context == ("kind" in raw):
        raise table.error("give exactly one of kind and context = true", "kind")
    return Signature(
        path=str(path),
        kind=None if context else table.choice("kind", KINDS),
        framework=table.get("framework"),
        phase=table.choice("phase", PHASES, "unknown"),
        wordings=tuple(
            w for row in table.tables("wording", "wording") for w in _wordings(row, path, make)
        ),
        tests=_tests(table, make),
        clauses=tuple(_pattern(row, path, make) for row in table.tables("clause", "clause")),
        wraps=_wraps(table),
        becomes=_becomes(table),
    )


def _tests(table: Table, make: Callable[..., Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the file's own tests; for a shipped file they are checked when they run."""
    if make is LazyPattern:
        return tuple(table.get("test", ()))
    return tuple(test.values for test in table.tables("test", "signature test"))


def read_quotations(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> list[Quotation]:
    """Read a file of quotations; ``make`` as in ``read_signature``.

    Raises:
        RuleError: the file has a mistake.
    """
    table = Table(raw, path, "", "quotations")
    return [
        Quotation(
            name=row.get("name"),
            pattern=_pattern(row, path, make),
            part=row.choice("part", _QUOTATION_PARTS),
            quoted=tuple(row.get("quoted")),
            real=tuple(row.get("real", ())),
            below_facts=row.get("below_facts", 1000),
        )
        for row in table.tables("quotation", "quotation")
    ]


def _pattern(row: Table, path: Path, make: Callable[..., Any]) -> Any:
    return make(row.get("pattern"), path=str(path), key=f"{row.key}.pattern")


def _wordings(row: Table, path: Path, make: Callable[..., Any]) -> Iterable[Wording]:
    """Yield one wording for each anchor of the row; all share its pattern."""
    pattern = _pattern(row, path, make)
    anchors = _anchors(row)
    facts = row.get("facts", {})
    for name, value in facts.items():
        if name not in REGISTRY:
            raise row.error(f"unknown fact {name!r}", name, hint=suggestion(name, REGISTRY))
        if not is_of_type(name, value):
            raise row.error(f"{name} is {REGISTRY[name].type}, not {value!r}", name)
    versions = row.get("versions")
    if versions is not None and make is not LazyPattern:
        check_versions(versions, row)
    shared = {
        "pattern": pattern,
        "source": row.get("source"),
        "versions": versions,
        "facts": facts,
        "phase": row.choice("phase", PHASES) if row.get("phase") else None,
        "near": bool(row.get("near", False)),
        "starts": bool(row.get("starts", False)),
        "framework": row.get("framework"),
        "kind": row.choice("kind", KINDS) if row.get("kind") else None,
        "ends": row.choice("ends", ENDS) if row.get("ends") else None,
        "role": row.get("role"),
        "key": f"{row.key}.pattern",
    }
    for anchor in anchors:
        yield Wording(anchor=anchor, **shared)


def _anchors(row: Table) -> list[str]:
    """Return the literals of a row; every match contains one of them."""
    if ("anchor" in row.values) == ("anchors" in row.values):
        raise row.error("give exactly one of anchor and anchors")
    if "anchors" in row.values:
        name = "anchors"
    else:
        name = "anchor"
    anchors = row.get("anchors", [row.get("anchor")])
    for anchor in anchors:
        if not isinstance(anchor, str) or not anchor.strip() or "\n" in anchor:
            raise row.error("an anchor must be a non-empty literal on one line", name)
    return list(anchors)


def check_versions(versions: str, row: Table) -> None:
    """Raise RuleError if ``versions`` is no range of versions (PEP 440)."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise row.error(
            f"not a version range: {versions!r}", "versions", hint='write it as ">=0.8,<0.20"'
        ) from None


def _wraps(table: Table) -> tuple[str, ...]:
    for kind in table.get("wraps", ()):
        if kind not in KINDS:
            raise table.error(f"{kind!r} is not a kind", "wraps")
    return tuple(table.get("wraps", ()))


def _becomes(table: Table) -> Mapping[str, str]:
    becomes = dict(table.get("becomes", {}))
    for phase, kind in becomes.items():
        if phase not in PHASES or kind not in KINDS:
            if phase not in PHASES:
                wrong = f"{phase!r} is not a phase"
            else:
                wrong = f"{kind!r} is not a kind"
            raise table.error(wrong, "becomes")
    return becomes
