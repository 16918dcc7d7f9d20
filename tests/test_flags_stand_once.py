"""An engine's flag stands once: in that engine's settings.toml, and neither spelled nor assembled in any Python file."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "oomguard"
DATA = (".toml", ".json")


def settings_files() -> list[Path]:
    return sorted(PACKAGE.glob("engines/*/settings.toml"))


def data_files() -> list[Path]:
    """Every data file of the package; rule files quote flags in what they explain."""
    found = sorted(path for path in PACKAGE.rglob("*") if path.suffix in DATA)
    return [path for path in found if path.relative_to(PACKAGE).parts[0] != "rules"]


def long_flags(path: Path) -> list[str]:
    """Return the long flags of an engine's file; short ones are other programs' too."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["settings"].values()
    return [flag for row in rows for flag in row.get("flags", ()) if flag.startswith("--")]


def spelled(text: str) -> Counter[str]:
    """Count each flag in a text, with dashes or underscores; its ``--no-`` form counts as the flag too."""
    words = [word.replace("_", "-") for word in re.findall(r"(?<![\w-])--(\w[\w-]*)", text)]
    return Counter(f"--{form}" for word in words for form in {word, word.removeprefix("no-")})


def assembled(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and source of each expression that makes a flag of something else: ``"--" + x``, ``f"--{x}"``, ``"--%s" % x``.

    What is made of a whole flag, whose dashes are taken off first, is that flag: the ``--no-`` form.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            made = any(
                _ends_in_dashes(before) and isinstance(after, ast.FormattedValue)
                for before, after in zip(node.values, node.values[1:], strict=False)
            )
        elif isinstance(node, ast.BinOp):
            formatted = isinstance(node.op, ast.Mod) and _has(node.left, r"(?<!-)--(no-)?%")
            made = formatted or (isinstance(node.op, ast.Add) and _ends_in_dashes(node.left))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            made = node.func.attr == "format" and _has(node.func.value, r"(?<!-)--(no-)?\{")
        else:
            continue
        if made and ".removeprefix('--')" not in ast.unparse(node):
            yield node.lineno, ast.unparse(node)


def _has(node: ast.AST, pattern: str) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and bool(re.search(pattern, node.value))
    )


def _ends_in_dashes(node: ast.AST) -> bool:
    return _has(node, r"(^|[^-])--(no-)?$")


def test_vllm_has_the_flags_that_its_memory_hangs_on():
    flags = long_flags(PACKAGE / "engines" / "vllm" / "settings.toml")

    assert {
        "--max-model-len",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--max-num-seqs",
    } <= set(flags)


def test_no_flag_of_an_engine_is_spelled_in_python():
    flags = {flag.replace("_", "-") for path in settings_files() for flag in long_flags(path)}
    found = [
        f"{path.relative_to(PACKAGE)}: {flag}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for flag in sorted(flags & spelled(path.read_text(encoding="utf-8")).keys())
    ]
    assert not found


def test_no_flag_is_assembled_in_python():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {source}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in [path.read_text(encoding="utf-8")]
        if re.search(r"""--(no-)?["'{%]""", text)
        for line, source in assembled(ast.parse(text))
    ]
    assert not found


def test_each_flag_of_an_engine_stands_once_in_the_data_files():
    """Another engine's own file may have the same spelling, for itself."""
    wrong = {}
    for path in settings_files():
        others = set(settings_files()) - {path}
        texts = [other.read_text(encoding="utf-8") for other in data_files() if other not in others]
        found = sum(map(spelled, texts), Counter())
        counted = {flag: found[flag.replace("_", "-")] for flag in long_flags(path)}
        wrong |= {
            f"{path.parent.name}: {flag}": number for flag, number in counted.items() if number != 1
        }

    assert not wrong, f"flags that stand more than once, and how often: {wrong}"


def test_an_assembled_flag_is_seen():
    sources = [
        '"--" + name',
        'f"--{name}"',
        'f"--no-{name}"',
        '"--%s" % name',
        '"--{}".format(name)',
        'f"vllm serve --{name} 5"',
        '"--" + name.replace("_", "-")',
    ]
    assert [source for source in sources if not list(assembled(ast.parse(source)))] == []


def test_what_makes_no_flag_is_not_taken_for_one():
    sources = [
        "f\"--no-{flag.removeprefix('--')}\"",
        'f"--allow {effect} permits it"',
        '["run", "--", name]',
        'f"{a} -- {b}"',
        '"-" * 3 + name',
    ]
    assert [source for source in sources if list(assembled(ast.parse(source)))] == []


def test_a_spelled_flag_is_counted():
    texts = {
        "--max-model-len 5": 1,
        "`--max_model_len=5`": 1,
        "--no-max-model-len": 1,
        "--max-model-length": 0,
        "max-model-len": 0,
        "--x--max-model-len": 0,
    }
    assert {text: spelled(text)["--max-model-len"] for text in texts} == texts
