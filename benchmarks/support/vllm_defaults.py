"""Defaults of vLLM as its sources write them: of the engine's arguments, of its configuration
classes, by size of device.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oomguard.engines.vllm.package import parsed

# What a default that is no literal is told as.
UNREAD = "not a literal"
_GIB = 1 << 30
_BATCH = {
    "default_max_num_seqs": "max_num_seqs",
    "default_max_num_batched_tokens": "max_num_batched_tokens",
}
_SERVER = "OPENAI_API_SERVER"


def default_of(expression: ast.expr | None, package: Path) -> Any:
    """Return what a default comes to: a literal, or a field of a configuration class."""
    match expression:
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return _field(owner, name, package)
        case ast.Call(
            func=ast.Name(id="get_field"), args=[ast.Name(id=owner), ast.Constant(value=name)]
        ):
            return _field(owner, name, package)
        case ast.Call(keywords=words):
            given = {word.arg: word.value for word in words}
            made = given.get("default_factory")
            if isinstance(made, ast.Name):
                empty = {"dict": {}, "list": []}.get(made.id, UNREAD)
            else:
                empty = UNREAD
            if "default" in given:
                return default_of(given["default"], package)
            return empty
        case None:
            return UNREAD
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return UNREAD


def _field(owner: str, name: str, package: Path) -> Any:
    fields = _configurations(package).get(owner, {})
    if name in fields:
        return default_of(fields[name], package)
    return UNREAD


@functools.cache
def _configurations(package: Path) -> Mapping[str, Mapping[str, ast.expr | None]]:
    """Return the fields of each class in vllm/config.py, or in the modules of vllm/config."""
    files = [
        path
        for path in (package / "config.py", *sorted((package / "config").glob("*.py")))
        if path.is_file()
    ]
    classes = [
        node for path in files for node in parsed(path).body if isinstance(node, ast.ClassDef)
    ]
    return {
        found.name: {
            line.target.id: line.value
            for line in found.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for found in classes
    }


def batch_defaults(package: Path) -> dict[tuple[str, str], int]:
    """Return what a server's rows and tokens default to, by setting and size of device; CPU values
    are for each rank.
    """
    tree = parsed(package / "engine" / "arg_utils.py")
    found: dict[tuple[str, str], int] = {}
    for size, body in _branches(tree):
        for line in body:
            if isinstance(line, ast.Assign):
                target = line.targets[0]
            else:
                target = None
            if (
                isinstance(line, ast.Assign)
                and isinstance(target, ast.Name)
                and target.id in _BATCH
            ):
                value = _servers(line.value)
                if value is not None:
                    found[_BATCH[target.id], size] = value
    for name in _BATCH.values():
        if (name, "large") in found:
            found.setdefault((name, "huge"), found[name, "large"])
    return found


def device_sizes(package: Path) -> tuple[dict[str, int], bool]:
    """Return the bytes from which a device is large, and huge; and whether an A100 is neither."""
    tests = [
        ast.unparse(test)
        for test, _body in _conditions(parsed(package / "engine" / "arg_utils.py"))
    ]
    sizes = {
        name: gib * _GIB
        for gib, name in ((70, "large"), (160, "huge"))
        if any(f">= {gib} *" in test for test in tests)
    }
    return sizes, any("'a100' not in" in test for test in tests)


def _conditions(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.If]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(name in ast.unparse(node) for name in _BATCH):
            yield node.test, node


def _branches(tree: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each branch that sets a default by the device, with the size that it is for."""
    for test, node in _conditions(tree):
        written = ast.unparse(test)
        if "is_cpu()" in written:
            yield "cpu", node.body
        elif "device_memory >=" in written:
            yield "huge" if ">= 160 *" in written else "large", node.body
            if node.orelse and not isinstance(node.orelse[0], ast.If):
                yield "small", node.orelse


def _servers(value: ast.expr) -> int | None:
    """Return a server's value: a number, or that of its key; of a product with the ranks the number
    alone.
    """
    if isinstance(value, ast.Dict):
        keyed = zip(value.keys, value.values, strict=True)
        return next(
            (
                _servers(own)
                for key, own in keyed
                if key is not None and ast.unparse(key).endswith(_SERVER)
            ),
            None,
        )
    if isinstance(value, ast.BinOp):
        return _servers(value.left)
    if isinstance(value, ast.Constant) and isinstance(value.value, int):
        return value.value
    return None
