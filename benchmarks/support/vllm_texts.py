"""What a vLLM can print, from its sources: each text with holes where a value goes, filled so that
a pattern can be tried on it.
"""

import ast
import itertools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

_PERCENT = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[sdrfgixX]")
_BRACES = re.compile(r"\{[\w.!]*(?::[^{}]*)?\}")
_AS_NUMBER = re.compile(r"[fge]$")
_DEFINED = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]{4,}")
_PIECE = re.compile(r"[A-Za-z_]{4,}(?::(?= ))?")
_QUOTED = re.compile(r"'(\w+)")
_MOST_FILLED = 600
# What stands in a hole of which nothing is known: as the patterns' facts are printed.
_ANY = (
    "7",
    "1.25",
    "cuda:0",
    "word",
    "cpu",
    "0.32.0",
    "1.25 GiB",
    "True",
    "False",
    "7,000",
    "(exit code: -9)",
    "{'a': -9}",
    "image",
    "[7]",
    "Traceback",
    "cuda",
)


# The same as Python writes them: what ``{name!r}`` and ``{name=}`` show.
_WRITTEN = ("'word'", "None", *(value for value in _ANY if value != "word"))


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the sources: literals, and between them holes, each with the values that may
    stand in it.

    ``literal`` is what is always printed, with a null character in place of each hole.
    """

    module: str
    parts: tuple[str | tuple[str, ...], ...]
    literal: str

    def may_hold(self, anchor: str) -> bool:
        """Return whether an anchor may be printed: around its longest word the literals agree with
        it as far as the next hole.
        """
        word = longest_word(anchor)
        at = self.literal.find(word)
        inside = anchor.index(word)
        while at >= 0:
            before = zip(reversed(self.literal[:at]), reversed(anchor[:inside]), strict=False)
            behind = zip(self.literal[at:], anchor[inside:], strict=False)
            if _agree(before) and _agree(behind):
                return True
            at = self.literal.find(word, at + 1)
        return False

    def filled(self) -> Iterator[str]:
        """Yield the text with its holes filled: with the same value in all that are not known, then
        with others.
        """
        holes = [part for part in self.parts if not isinstance(part, str)]
        alike = ([one if one in hole else hole[0] for hole in holes] for one in _ANY)
        for values in itertools.chain(
            alike, itertools.islice(itertools.product(*holes), _MOST_FILLED)
        ):
            left = iter(values)
            yield "".join(part if isinstance(part, str) else next(left) for part in self.parts)


def _agree(pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether the characters are the same up to the first hole."""
    return all(
        one == other for one, other in itertools.takewhile(lambda pair: pair[0] != "\0", pairs)
    )


def printed_texts(package: Path, anchors: Collection[str]) -> list[Text]:
    """Return the texts of a package's modules in which one of these anchors may stand; docstrings
    are left out.
    """
    found = []
    words = [
        (longest_word(anchor), [part.encode() for part in _PIECE.findall(anchor) or [anchor]])
        for anchor in anchors
    ]
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        held = {longest for longest, parts in words if all(part in content for part in parts)}
        if held:
            module = path.relative_to(package.parent).as_posix()
            texts = (_text(module, parts, anchors) for parts in _texts(_parsed(content)))
            found += [text for text in texts if any(word in text.literal for word in held)]
    return found


def longest_word(anchor: str) -> str:
    """Return the longest word of an anchor: what stands in no text of the sources is printed by
    none.
    """
    return max(_WORD.findall(anchor), key=len, default=anchor)


def _text(module: str, parts: list[Any], anchors: Collection[str]) -> Text:
    """Return a text of a module; a value that is shown as Python writes it may be a word that an
    anchor of this text quotes.
    """
    literal = "".join(part if isinstance(part, str) else "\0" for part in parts)
    if _WRITTEN in parts:
        own = sorted(anchor for anchor in anchors if longest_word(anchor) in literal)
        quoted = [repr(word) for anchor in own for word in _QUOTED.findall(anchor)]
        parts = [(*quoted, *part) if part == _WRITTEN else part for part in parts]
    return Text(module, tuple(parts), literal)


def traced_lines(package: Path, anchors: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield what a traceback may show of a package's functions and lines, where one of these
    anchors stands in it, by module.
    """
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package.parent).as_posix()
        content = path.read_text(encoding="utf-8")
        shown = [f'  File "{module}", line 1, in {name}' for name in _DEFINED.findall(content)]
        lines = [*shown, *content.splitlines()]
        if any(anchor in line for anchor in anchors for line in shown):
            lines += _with_their_functions(module, content)
        held = [
            anchor
            for anchor in anchors
            if anchor in content or any(anchor in line for line in shown)
        ]
        yield from ((module, line) for line in lines if any(anchor in line for anchor in held))


def _with_their_functions(module: str, content: str) -> Iterator[str]:
    """Yield each line of a module's functions as a traceback shows it: beneath the
    function's name.
    """
    name = ""
    for line in content.splitlines():
        if defined := _DEFINED.search(line):
            name = defined.group(1)
        elif name:
            yield f'  File "{module}", line 1, in {name}\n    {line.strip()}'


def _parsed(content: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(content)


def _texts(tree: ast.AST) -> Iterator[list[Any]]:
    """Yield the parts of each text: of records as they print themselves, of what is joined from a
    list, of a progress bar.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef) and _is_record(node):
            yield _shown(node)
        elif isinstance(node, (ast.List, ast.Tuple)):
            listed = [parts for parts in map(_parts, node.elts) if parts is not None]
            yield _with_holes([part for parts in listed for part in (*parts, ", ")])
        elif _is_of_a_bar(node) and (parts := _parts(node.value)) is not None:
            yield _with_holes([*parts, ": 7%"])
        if (parts := _parts(node)) is not None:
            yield _with_holes(parts)
            waiting += _inner(node)
        else:
            waiting += [child for child in ast.iter_child_nodes(node) if not _is_prose(child)]


def _is_of_a_bar(node: ast.AST) -> TypeGuard[ast.keyword | ast.Assign]:
    """Return whether what is given here stands before a progress bar."""
    if isinstance(node, ast.Assign):
        named = node.targets[0]
    else:
        named = None
    if isinstance(node, ast.keyword):
        given = node.arg
    elif isinstance(named, ast.Name):
        given = named.id
    else:
        given = None
    return given is not None and given.endswith("desc")


def _is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _shown(node: ast.ClassDef) -> list[Any]:
    """Return how a dataclass prints itself."""
    parts: list[Any] = [f"{node.name}("]
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            parts += [f"{line.target.id}=", _ANY, ", "]
    return parts


def _is_prose(node: ast.AST) -> bool:
    """Return whether a statement is a text alone: a docstring prints nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _inner(node: ast.AST) -> list[ast.AST]:
    """Return the expressions inside a text, which may hold texts of their own."""
    return [part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]


def _parts(node: ast.AST) -> list[Any] | None:
    """Return an expression as literals and holes, None for one that is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return [one.value if isinstance(one, ast.Constant) else _hole(one) for one in values]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = [(side, _parts(side)) for side in (left, right)]
            known = any(parts is not None for _side, parts in both)
            if known:
                return [part for side, parts in both for part in (parts or [_hole(side)])]
            return None
        case ast.BinOp(left=left, op=ast.Mod()):
            return _parts(left)
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            inside = _parts(text)
            if inside is None:
                return None
            return _split(inside, _BRACES)
    return None


def _split(parts: list[Any], holes: re.Pattern[str]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        if not isinstance(part, str):
            found.append(part)
            continue
        at = 0
        for match in holes.finditer(part):
            found += [part[at : match.start()], _of_format(match.group().strip("{}"))]
            at = match.end()
        found.append(part[at:])
    return found


def _with_holes(parts: list[Any]) -> list[Any]:
    """Return a text with the holes of a logger's ``%s``, and ``%%`` as it is printed."""
    return [
        part.replace("%%", "%") if isinstance(part, str) else part
        for part in _split(parts, _PERCENT)
    ]


def _hole(node: ast.AST) -> tuple[str, ...]:
    """Return what may stand in a hole: by its format, else the texts that its expression names and
    all kinds of values.
    """
    if isinstance(node, ast.FormattedValue) and node.conversion == ord("r"):
        return _WRITTEN
    written = ast.unparse(node)
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        known = _of_format(ast.unparse(node.format_spec).strip("f'\""))
        if known != _ANY:
            return known
    if "gib" in written.lower():
        return ("1.25", "1.25 GiB")
    named = [
        n.value
        for n in ast.walk(node)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value
    ]
    return tuple(dict.fromkeys([*named[:4], *_ANY, ""]))


def _of_format(form: str) -> tuple[str, ...]:
    if _AS_NUMBER.search(form):
        return ("1.25",)
    if form.endswith(("d", "i")):
        return ("7",)
    if form.endswith(","):
        return ("7,000",)
    return _ANY
