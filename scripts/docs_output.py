"""Run the commands that the pages show; say where a page no longer shows what they print, or write
it there.

    python scripts/docs_output.py [--check] [--vllm] [PAGE …]

A page's blocks run from top to bottom in one folder, which holds a copy of examples/
(CONTRIBUTING.md: a copy of the repository). A block with a title="NAME" is written to the file
NAME, or added to its end where there is one; a diff with a title changes that file. A comment above
a block says that it shows a command and its output:

    <!-- output -->                   "$ COMMAND", then what it prints; a line "…" stands for lines
    left out <!-- output: labels -->           the same; of each line only what it is about is
    compared, not how it is <!-- output: vllm -->             the same with the real vLLM, checked
    by tests/vllm <!-- output: vllm until TEXT -->  the same for a server: it is stopped once TEXT
    is printed
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.relative_to(ROOT / "docs").parts[0] not in ("reference", "rules")  # from the code
    ),
)
COPIED = {"CONTRIBUTING.md": ("oomguard", "rules", "docs", "examples", "pyproject.toml")}
LEFT_OUT = "…"
PORT = "8123"
LIMIT_S = 600
LEAST_LIKENESS = 0.4
_BLOCK = re.compile(
    r"^(?P<output><!-- output(?:: (?P<how>[^\n]*?))? -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\w*)(?: title=\"(?P<file>[^\"\n]+)\")?\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is a file, or a command's output; ``start`` and ``end`` are where its text
    stands in the page.
    """

    file: str | None
    how: str
    is_diff: bool
    text: str
    start: int
    end: int

    @property
    def needs_vllm(self) -> bool:
        """Whether the command starts the real vLLM."""
        return self.how.startswith("vllm")

    @property
    def until(self) -> str | None:
        """What a server prints when it is to be stopped, None for a command that ends by itself."""
        return self.how.partition("until ")[2] or None


def blocks(text: str) -> list[Block]:
    """The blocks of a page that are a file or an output, in order."""
    found = (m for m in _BLOCK.finditer(text) if m["output"] or m["file"])
    return [
        Block(
            m["file"],
            m["how"] or "",
            m["language"] == "diff",
            m["text"],
            m.start("text"),
            m.end("text"),
        )
        for m in found
    ]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block, as it is written, with the lines that stand below it."""
    for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE):
        lines = part.splitlines()
        if lines:
            first = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
            yield "\n".join(lines[: first + 1]), lines[first + 1 :]


def prepare(page: Path, folder: Path, env: dict[str, str], *, vllm: bool) -> None:
    """Fill the folder that the page's commands run in; for the real vLLM also with a tiny model,
    ./tiny.
    """
    for name in COPIED.get(page.name, ("examples",)):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    if vllm:
        make = ["python", "examples/make_tiny_model.py", "tiny"]
        subprocess.run(make, cwd=folder, env=env, check=True, capture_output=True)


def environment(page: Path, folder: Path, *, vllm: bool) -> dict[str, str]:
    """The variables that make the output the same everywhere: 80 columns, no colour, nobody's own
    settings.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OOMGUARD_", "VLLM_"))
    }
    if vllm:
        bins = ROOT / ".venv-vllm" / "bin"
    else:
        bins = Path(sys.executable).parent
    if page.name in COPIED:
        source = folder
    else:
        source = ROOT
    return env | {
        "PATH": f"{bins}{os.pathsep}{env['PATH']}",
        "PYTHONPATH": str(source),
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "LC_ALL": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "XDG_STATE_HOME": str(folder / ".state"),
    }


def run(command: str, folder: Path, env: dict[str, str], until: str | None = None) -> list[str]:
    """The lines that a command prints on both streams; a server is stopped once it has printed
    ``until``.

    Raises TimeoutError where it has not ended after ``LIMIT_S``: it is then stopped, with what it
    started.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = ["bash", "-c", command.removeprefix("$ ").replace(PORT, port)]
    lines = []
    with subprocess.Popen(
        words,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        late = threading.Event()
        limit = threading.Timer(
            LIMIT_S, lambda: (late.set(), os.killpg(process.pid, signal.SIGTERM))
        )
        limit.start()
        try:
            for line in process.stdout:
                shown = line.rstrip().replace(port, PORT).replace(str(folder), "~")
                shown = re.sub(
                    rf"@{re.escape(socket.gethostname())}\b", "@node7", shown
                )  # whose name has any length
                lines.append(re.sub(r"/\S*/\.venv\b", ".venv", shown))
                if until is not None and until in line:
                    process.send_signal(signal.SIGTERM)
                    break
            process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        finally:
            limit.cancel()
    if late.is_set():
        raise TimeoutError(
            f"{command}\nhad not ended after {LIMIT_S} s; it printed:\n" + "\n".join(lines)
        )
    while lines and not lines[-1]:
        lines.pop()
    return lines


def stable(line: str, *, labels: bool = False) -> str:
    """A line without what varies from run to run or by machine, and without the widths that follow
    from it.

    Times, process ids, how many rules there are, and where in the engine's output something stands:
    how many warnings an engine prints first is up to the machine (NUMA, limits, deprecations).
    """
    if labels:  # "ok       torch 2.13.0" -> "torch"; what to do about a line is indented
        if line.startswith(" "):
            return ""
        return re.sub(r"^(?:ok|unknown|problem)\s+", "", line).split(" ")[0].rstrip(":")
    line = re.sub(r"\d+\.\d s\b", "# s", line)
    line = re.sub(r"pid=\d+", "pid=#", line)
    line = re.sub(r"\blines? \d+(?:, \d+)*", "line #", line)
    line = re.sub(r"\b\d+ (?=(?:tests|signature files|rules|pages|checks|changed)\b)", "# ", line)
    line = re.sub(r"\b(?:\d{4}-)?\d\d-\d\d \d\d:\d\d(?::\d\d)?\b", "#", line)
    return " ".join(re.sub(r"─{2,}", "─", line).split())


def chunks(shown: list[str]) -> list[list[str]]:
    """The lines between those that stand for lines left out; empty at an end that is open."""
    parts: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def difference(shown: list[str], printed: list[str], *, labels: bool = False) -> str | None:
    """What the page shows and the command does not print, None where they agree."""
    now = [stable(line, labels=labels) for line in printed]
    if labels:
        missing = [line for line in shown if stable(line, labels=True) not in now]
        if missing:
            return f"never printed: {missing[0]!r}"
        return None
    at = 0
    parts = chunks(shown)
    for number, part in enumerate(parts):
        wanted = [stable(line) for line in part]
        last = number == len(parts) - 1
        if number == 0:
            starts = [0]
        elif last:
            starts = [len(now) - len(wanted)]
        else:
            starts = range(at, len(now) - len(wanted) + 1)
        if not wanted and (number or len(parts) > 1):
            continue
        found = next((i for i in starts if i >= at and now[i : i + len(wanted)] == wanted), None)
        if found is None or (last and found + len(wanted) != len(now)):
            return "\n".join(
                difflib.unified_diff(shown, printed, "the page", "the command", lineterm="")
            )
        at = found + len(wanted)
    return None


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """The lines to show now; what was left out is left out again, from the same line to the same
    line.

    A line that is worded otherwise now is found by its likeness. Raises ValueError if no line is
    like it.
    """
    if LEFT_OUT not in (line.strip() for line in shown):
        return printed
    now = [stable(line) for line in printed]
    at = 0
    lines = []
    parts = chunks(shown)
    for number, part in enumerate(parts):
        if number:
            lines.append(LEFT_OUT)
        if not part:
            continue
        if number == 0:
            first = 0
        else:
            first = closest(stable(part[0]), now, at)
        if number == len(parts) - 1:
            at = len(now)
        else:
            at = closest(stable(part[-1]), now, first) + 1
        lines += printed[first:at]
    return lines


def closest(line: str, lines: list[str], start: int) -> int:
    """Return where a line is, from ``start`` on; if it is not there, the line most like it."""
    if line in lines[start:]:
        return lines.index(line, start)
    likeness = [difflib.SequenceMatcher(None, line, one).ratio() for one in lines]
    best = max(range(start, len(lines)), key=lambda at: likeness[at], default=start)
    if start >= len(lines) or likeness[best] < LEAST_LIKENESS:
        raise ValueError(f"no line is like {line!r}")
    return best


def write(block: Block, target: Path) -> None:
    """Write a block to its file, add it to the file's end, or change the file as a diff says."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        there = target.read_text(encoding="utf-8")
    else:
        there = ""
    if not block.is_diff:
        target.write_text(there + block.text, encoding="utf-8")
        return
    lines = block.text.splitlines(keepends=True)
    old, new = (
        "".join(line[1:] or "\n" for line in lines if line[0] in kinds)
        for kinds in (" -\n", " +\n")
    )
    if there.count(old) != 1:
        raise ValueError(f"{block.file} has these lines {there.count(old)} times:\n{old}")
    target.write_text(there.replace(old, new), encoding="utf-8")


def walk(
    page: Path, folder: Path, *, vllm: bool = False
) -> Iterator[tuple[Block, str, list[str], list[str]]]:
    """Run a page's blocks in this folder: block, command, lines shown, lines printed."""
    # The sockets of a Ray cluster need a short path, and its files go with it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        env = environment(page, folder, vllm=vllm) | {"RAY_TMPDIR": short}
        prepare(page, folder, env, vllm=vllm)
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.file is not None:
                write(block, folder / block.file)
            elif block.needs_vllm == vllm:
                for command, shown in commands(block.text):
                    yield block, command, shown, run(command, folder, env, block.until)


def problems(page: Path, folder: Path, *, vllm: bool = False) -> list[str]:
    """Where the page differs from what its commands print."""
    found = []
    for block, command, shown, printed in walk(page, folder, vllm=vllm):
        told = difference(shown, printed, labels=block.how == "labels")
        if told is not None:
            found.append(f"{page.name}: {command}\n{told}")
    return found


def rewrite(page: Path, folder: Path, *, vllm: bool = False) -> int:
    """Write into the page what its commands print now; how many blocks changed."""
    text = page.read_text(encoding="utf-8")
    new: dict[Block, list[str]] = {}
    for block, command, shown, printed in walk(page, folder, vllm=vllm):
        labels = block.how == "labels"
        same = bool(shown) and difference(shown, printed, labels=labels) is None
        new.setdefault(block, []).extend([command, *(shown if same else renewed(shown, printed))])
    changed = 0
    for block in sorted(new, key=lambda b: -b.start):
        lines = "".join(f"{line}\n" for line in new[block])
        changed += lines != block.text
        text = text[: block.start] + lines + text[block.end :]
    page.write_text(text, encoding="utf-8")
    return changed


def main() -> int:
    """Check the pages, or rewrite their blocks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a page differs"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="the blocks that need the real vLLM, and no others"
    )
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    chosen = parser.parse_args()
    status = 0
    for page in chosen.pages:
        with tempfile.TemporaryDirectory() as folder:
            if chosen.check:
                found = problems(page, Path(folder), vllm=chosen.vllm)
                print("\n".join(found), end="\n" if found else "")
                status |= bool(found)
            else:
                print(
                    f"{page.name}: {rewrite(page, Path(folder), vllm=chosen.vllm)} blocks changed"
                )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
