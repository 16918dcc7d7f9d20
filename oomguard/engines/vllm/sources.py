"""What a vLLM offers, read from its sources: an installed package or an unzipped wheel. Nothing of it is imported, nothing is run.

Read are the flags of its command line, the engine arguments behind them, and the place where the plugin hooks in.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.engines.vllm.plugin import GROUP, HOOK

# What loads plugins, and the method of the engine arguments that calls it: before their configuration is made.
_LOADER: Final = ("plugins/__init__.py", "load_general_plugins")
_CALLER: Final = "__post_init__"


@dataclass(frozen=True, slots=True)
class Sources:
    """What one vLLM offers.

    Attributes:
        flags: each flag of the engine's arguments, and whether it has a ``--no-`` form where it is a switch.
        arguments: the engine arguments by name, each with its default as it is written; None where it has none.
        parameters: what the hooked function takes behind ``self``; None where it is missing.
        hook_problem: why the plugin cannot hook in; None where it can.
    """

    flags: Mapping[str, bool]
    arguments: Mapping[str, ast.expr | None]
    parameters: tuple[str, ...] | None
    hook_problem: str | None


def read_sources(package: Path) -> Sources:
    """Read a package's sources.

    Raises:
        OSError: a file is missing or cannot be read.
        SyntaxError, ValueError: a file is no Python.
    """
    name, owner, function = HOOK
    tree = parsed(package / Path(*name.split(".")[1:]).with_suffix(".py"))
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
    body = found.body if found is not None else []
    hooked = next((node for node in body if getattr(node, "name", None) == function), None)
    return Sources(
        dict(_flags(tree)),
        {n.target.id: n.value for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)},
        tuple(_parameters(hooked)[1:]) if isinstance(hooked, ast.FunctionDef) else None,
        _hook_problem(found, hooked) or _loader_problem(found, package),
    )


def parsed(path: Path) -> ast.Module:
    """Parse a file. Raises OSError, SyntaxError and ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that a newer Python warns of: the file is not ours
        return ast.parse(path.read_bytes())


def added_arguments(tree: ast.AST) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    """Yield the flags of each ``add_argument`` with its call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            flags = tuple(word for word in words if isinstance(word, str) and word.startswith("-"))
            if flags:
                yield flags, node


def _flags(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    for flags, call in added_arguments(tree):
        action = next((ast.unparse(word.value) for word in call.keywords if word.arg == "action"), "")
        for flag in flags:
            yield flag, "store" not in action


def _parameters(hooked: ast.FunctionDef) -> list[str]:
    taken = hooked.args
    return [arg.arg for arg in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]


def _hook_problem(found: ast.ClassDef | None, hooked: ast.stmt | None) -> str | None:
    _module, owner, function = HOOK
    if found is None:
        return f"it has no {owner}"
    if not any("dataclass" in ast.unparse(decorator) for decorator in found.decorator_list):
        return f"its {owner} is no dataclass"
    if hooked is None:
        return f"its {owner} has no {function}"
    if not isinstance(hooked, ast.FunctionDef) or hooked.decorator_list or not _parameters(hooked):
        return f"its {owner}.{function} is no plain method"
    return None


def _loader_problem(found: ast.ClassDef | None, package: Path) -> str | None:
    """Return why plugins would not be loaded before the hook is reached, None where they are."""
    where, loader = _LOADER
    caller = next((n for n in found.body if getattr(n, "name", None) == _CALLER), None) if found is not None else None
    if caller is None or f"{loader}()" not in ast.unparse(caller):
        return f"its engine arguments do not call {loader}"
    constants = (node.value for node in ast.walk(parsed(package / where)) if isinstance(node, ast.Constant))
    return None if GROUP in constants else f"it knows no entry points of {GROUP}"
