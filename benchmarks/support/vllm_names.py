"""Names of vLLM that oomguard uses, beyond flags and texts: environment variables, commands,
modules, what ``--ask-engine`` imports.
"""

import ast
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from oomguard.core.files import read_tables
from oomguard.engines.vllm import command as vllm_command
from oomguard.engines.vllm.package import added_arguments, parsed
from oomguard.estimate import constants
from oomguard.estimate.start import engine_layout, failed_allocation
from support.vllm_rows import Row, is_in, presence

OWN = Path(constants.__file__).parents[1]
_VARIABLE = re.compile(r"(?<![A-Z_])VLLM_[A-Z0-9_]*[A-Z0-9]")
_ALLOCATIONS = Path(failed_allocation.__file__).with_name("allocations.toml")
_CITED = re.compile(r"(?P<module>vllm/[\w/]+\.py)(?: (?P<symbol>[\w.]+))?, (?P<version>[\d.]+)")
_GRAPHS = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"


@functools.cache
def variables_named() -> tuple[str, ...]:
    """Return the variables of vLLM's environment that oomguard reads, sets or speaks of: each that
    its code and data name.
    """
    files = [path for path in OWN.rglob("*") if path.suffix in {".py", ".toml"}]
    return tuple(
        sorted(
            {name for path in files for name in _VARIABLE.findall(path.read_text(encoding="utf-8"))}
        )
    )


def variable_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield each variable, and whether CUDA graphs are counted before the KV cache."""
    tree = parsed(package / "envs.py")
    known = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for name in variables_named():
        yield presence(
            "variable", name, stated=is_in(only_in.get(name), version), found=name in known
        )
    read = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.getenv"
    )
    given = (
        ast.literal_eval(n.args[1])
        for n in read
        if len(n.args) > 1 and ast.unparse(n.args[0]) == repr(_GRAPHS)
    )
    counted = constants.constant(
        "cudagraph_accounting", constants.engine_version(version), runner=1
    )["subtracted"]
    yield Row(
        "default",
        "CUDA graphs are counted",
        str(counted),
        str(next(given, "0") == "1"),
        "vllm/envs.py",
    )


def import_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield what ``plan --ask-engine`` imports from the installed vLLM."""
    for node in ast.walk(parsed(Path(engine_layout.__file__))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found = defines(package, node.module or "", alias.name)
                yield presence(
                    "import", name, stated=is_in(only_in.get(name), version), found=found
                )


def defines(package: Path, module: str, name: str) -> bool:
    at = package.parent / Path(*module.split("."))
    if (at / f"{name}.py").is_file() or (at / name / "__init__.py").is_file():
        return True
    if at.with_suffix(".py").is_file():
        path = at.with_suffix(".py")
    else:
        path = at / "__init__.py"
    if not path.is_file():
        return False
    tree = parsed(path)
    bound = {getattr(node, "name", None) for node in tree.body}
    bound |= {
        (a.asname or a.name)
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    bound |= {
        t.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    bound |= {
        n.target.id
        for n in ast.walk(tree)
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    starred = [
        n.module
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.names[0].name == "*" and n.module
    ]
    inside = (m if m.startswith("vllm") else f"{module}.{m}" for m in starred)
    return name in bound or any(defines(package, other, name) for other in inside)


def endpoint_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield the endpoints whose requests do not count, since they only look or tell the server what
    to do.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in package.glob("entrypoints/**/*.py"))
    for path in tomllib.loads(
        Path(vllm_command.__file__).with_name("effects.toml").read_text(encoding="utf-8")
    )["not_requests"]:
        yield presence(
            "endpoint", path, stated=is_in(only_in.get(path), version), found=f'"{path}"' in text
        )


def cited_rows(package: Path, version: str) -> Iterator[Row]:
    """Yield where the named allocations are made, of those whose row cites this version."""
    for cited in dict.fromkeys(
        row["source"]
        for row in read_tables("allocations", [_ALLOCATIONS])[_ALLOCATIONS]["allocation"]
    ):
        found = _CITED.fullmatch(cited)
        if found is None or found["version"] != version:
            continue
        path = package.parent / found["module"]
        symbol = (found["symbol"] or "").split(".")[-1]
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        else:
            text = ""
        if symbol:
            made = re.search(rf"\b(?:def|class) {symbol}\b", text)
        else:
            made = path.is_file()
        yield presence("cited", cited, stated=True, found=bool(made))


def command_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield the subcommands and modules that hand settings to the engine, and the flags by which a
    benchmark's length is read.
    """
    own = vllm_command.table()
    for words in own["own"]:
        if words[0] == "vllm":
            said = " ".join(words)
            yield presence(
                "command",
                said,
                stated=is_in(only_in.get(said), version),
                found=_has_command(package, words[1:]),
            )
    for name in own["modules"]:
        at = package.parent / Path(*name.rstrip(".").split("."))
        if name.endswith("."):
            found = at.is_dir()
        else:
            found = at.with_suffix(".py").is_file()
        yield presence("command", name, stated=is_in(only_in.get(name), version), found=found)
    flags = _benchmark_flags(package)
    parts = itertools.chain.from_iterable(row["parts"] for row in own["lengths"])
    for flag in dict.fromkeys(flag for part in parts for flag in part["flags"]):
        yield presence(
            "command",
            f"bench {flag}",
            stated=is_in(only_in.get(f"bench {flag}"), version),
            found=flag in flags,
        )


@functools.cache
def _benchmark_flags(package: Path) -> frozenset[str]:
    trees = [parsed(path) for path in package.glob("benchmarks/**/*.py")]
    return frozenset(
        flag for tree in trees for flags, _call in added_arguments(tree) for flag in flags
    )


def _has_command(package: Path, words: list[str]) -> bool:
    """Return whether each word is a subcommand's name: ``name = "serve"`` of its class, or what a
    parser is added for.
    """
    named = set()
    for path in package.glob("entrypoints/cli/**/*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {
                "name",
                "self.name",
            }:
                named.add(
                    ast.literal_eval(node.value) if isinstance(node.value, ast.Constant) else ""
                )
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("add_parser")
                and node.args
            ):
                named.add(node.args[0].value if isinstance(node.args[0], ast.Constant) else "")
    return set(words) <= named
