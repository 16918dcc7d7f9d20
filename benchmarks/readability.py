"""Measure how readable the package is: names, splinters, density, long lines, and the files that
each trip executes.

    python benchmarks/readability.py

Every figure is printed with its goal. The densities count nodes of the syntax tree per 1,000 lines
of the package.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "oomguard"
LOG = ROOT / "examples" / "logs" / "vllm_serve_kv_cache.log"
CONFIG = ROOT / "examples" / "models" / "llama-3.1-8b.json"
WIDTH = 100
SPLINTER_LINES = 120
# Words in -ed and -en that are nouns or adjectives of the field, and participles that do not end
# so.
NOT_PARTICIPLES = {"shared", "guarded", "quantized", "compressed", "need", "training", "wording"}
IRREGULAR = {
    "begun",
    "found",
    "given",
    "heard",
    "held",
    "kept",
    "known",
    "left",
    "lent",
    "made",
    "read",
    "said",
}
IRREGULAR |= {"seen", "sent", "set", "shown", "spoken", "taken", "told", "written"}
# What one guarded call that fits, one relaunch, one diagnosis and one plan execute of the package.
TRIPS = {
    "guarded call that fits": (
        "import oomguard\n@oomguard.guard()\ndef call():\n    return 1\ncall()",
        35,
    ),
    "diagnose": (
        (
            "from oomguard.cli import main; import sys; "
            f"sys.argv=['oomguard','diagnose',{str(LOG)!r}]; main()"
        ),
        45,
    ),
    "plan": (
        (
            "from oomguard.cli import main; import sys; sys.argv=['oomguard','plan',"
            f"{str(CONFIG)!r},'--gpu-memory','24GiB']; main()"
        ),
        40,
    ),
}


def sources() -> dict[str, str]:
    """Return the text of each module by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path.read_text(
            encoding="utf-8"
        )
    return found


def is_participle(name: str) -> bool:
    """Return whether a module's name ends in a participle, which says nothing of what is in it."""
    last = name.rsplit("_", 1)[-1]
    if last in IRREGULAR:
        return True
    return last not in NOT_PARTICIPLES and re.fullmatch(r"[a-z]{2,}(ed|ing)", last) is not None


def importers(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return for each module those that import it, lazily or not."""
    by = collections.defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    by[full if full in trees else node.module].add(name)
    return by


def splinters(texts: dict[str, str], trees: dict[str, ast.Module]) -> list[str]:
    """Return the short modules that exactly one module imports, a neighbour in the same folder."""
    by = importers(trees)
    found = []
    for name, text in texts.items():
        if name.endswith("__init__") or len(by[name]) != 1:
            continue
        (only,) = by[name]
        if (
            only.rpartition(".")[0] == name.rpartition(".")[0]
            and len(text.splitlines()) < SPLINTER_LINES
        ):
            found.append(name)
    return found


def doubles(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public classes whose name stands in more than one module."""
    where = collections.defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    return {name: places for name, places in where.items() if len(places) > 1}


def packed(node: ast.AST) -> bool:
    """Return whether a statement assigns several values to several names at once."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    return isinstance(node.value, ast.Tuple)


def comment_lines(text: str) -> int:
    """Return the lines that hold nothing but a comment, or end in one."""
    return sum(
        token.type == tokenize.COMMENT
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def executed(code: str) -> int:
    """Return how many files of the package a fresh Python runs code of."""
    report = (
        "import sys; print(len([m for m in sys.modules if m.split('.')[0]=='oomguard']), "
        "file=sys.stderr)"
    )
    with tempfile.TemporaryDirectory() as home:
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import atexit\natexit.register(lambda: exec({report!r}))\n{code}",
            ],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "HOME": home, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    return int(ran.stderr.split()[-1])


def main() -> None:
    """Print every figure beside its goal."""
    texts = sources()
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = sum(len(text.splitlines()) for text in texts.values())
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    files = [name for name in texts if not name.endswith("__init__") or texts[name].strip()]
    participles = [name for name in texts if is_participle(name.rsplit(".", 1)[-1])]
    twice = doubles(trees)
    rows = [
        ("lines", lines, ""),
        ("files", len(files), "260"),
        ("participles among module names", len(participles), "5"),
        ("public class names that stand twice", len(twice), "0"),
        ("short modules that one neighbour alone imports", len(splinters(texts, trees)), "25"),
        (
            "conditional expressions per 1,000 lines",
            sum(isinstance(n, ast.IfExp) for n in nodes) / lines * 1000,
            "10",
        ),
        (
            "comprehensions per 1,000 lines",
            sum(isinstance(n, comprehensions) for n in nodes) / lines * 1000,
            "12",
        ),
        ("packed assignments per 1,000 lines", sum(map(packed, nodes)) / lines * 1000, "1"),
        (
            "lines above 100 columns, %",
            sum(len(line) > WIDTH for text in texts.values() for line in text.splitlines())
            / lines
            * 100,
            "0.3",
        ),
        ("comment lines, %", sum(map(comment_lines, texts.values())) / lines * 100, "3 to 7"),
        *(
            (f"files executed: {name}", executed(code), str(goal))
            for name, (code, goal) in TRIPS.items()
        ),
    ]
    for name, value, goal in rows:
        if isinstance(value, float):
            shown = f"{value:.2f}"
        else:
            shown = f"{value:,}"
        print(f"{name:50} {shown:>9}   goal {goal}" if goal else f"{name:50} {shown:>9}")
    if "--names" in sys.argv:
        print("\nparticiples:", *participles, sep="\n  ")
        print(
            "\ntwice:",
            *(f"{name}: {', '.join(places)}" for name, places in twice.items()),
            sep="\n  ",
        )
        print("\nsplinters:", *splinters(texts, trees), sep="\n  ")


if __name__ == "__main__":
    main()
