"""What oomguard reads of a vLLM's output, tried on what its sources can print: signatures,
refusals, lines of requests, the log's form.
"""

import ast
import json
import logging
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.engines.vllm import command as vllm_command
from oomguard.engines.vllm.in_process.message_receiver import CORE_FAILED
from oomguard.engines.vllm.package import parsed
from oomguard.rules.rule_files import load_rules
from oomguard.rules.signature import Wording
from oomguard.scan.lines import peel
from support.vllm_rows import Row, is_in, presence
from support.vllm_texts import Text, printed_texts, traced_lines

_OWN = "vllm/"
# How the words may stand: as they are, behind an exception's name, in a line of a server's log, as
# a part of the configuration.
_LEADS = (
    "",
    "RuntimeError: ",
    "(APIServer pid=7) INFO 11-22 10:00:00 [loggers.py:1] ",
    "speculative_config=",
)
_ABSENT = "absent"
_OTHERWISE = "its words are there, the pattern matches none of them"
_RECORD = {"fileinfo": "core.py", "vllm_process_name": "EngineCore"}


@dataclass(frozen=True, slots=True)
class Looked:
    """A text that is looked for: one of its anchors stands in it, and its pattern matches;
    ``source`` names the modules known for it.
    """

    name: str
    anchors: tuple[str, ...]
    versions: str | None
    search: Callable[[str], Any]
    source: str = ""

    def place(self, modules: Collection[str]) -> str:
        """Return the module to name of those that print it: one that is known for it, else the
        first.
        """
        return next(
            (module for module in modules if module in self.source), next(iter(modules), "")
        )


def wordings(*, near: bool) -> list[Looked]:
    """Return the wordings that vLLM itself prints; ``near`` are those that a traceback shows."""
    found: dict[tuple[str, str], list[Wording]] = {}
    for signature in load_rules().signatures:
        for wording in signature.wordings:
            if wording.source.startswith(_OWN) and wording.near is near:
                found.setdefault((signature.name, wording.key), []).append(wording)
    return [
        Looked(
            f"{name}: {row.anchor}",
            tuple(one.anchor for one in rows),
            row.versions,
            row.pattern.search,
            row.source,
        )
        for (name, _key), rows in found.items()
        for row in rows[:1]
    ]


def printed_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield each text that oomguard looks for, with the module that prints it; ``only_in`` has
    versions of those without their own.
    """
    looked = wordings(near=False)
    for pattern in vllm_command.table()["refusals"]["patterns"]:
        looked.append(
            Looked(
                f"refusal: {pattern}",
                (_longest(pattern),),
                only_in.get(pattern),
                re.compile(pattern).search,
            )
        )
    for row in _request_lines():
        anchor = row["anchor"]
        search = re.compile(row["pattern"]).search
        looked.append(
            Looked(f"request: {anchor}", (anchor,), only_in.get(anchor), search, row["source"])
        )
    looked.append(
        Looked(
            "a core that fails to start",
            (CORE_FAILED,),
            None,
            re.compile(re.escape(CORE_FAILED)).search,
        )
    )
    texts = printed_texts(package, {anchor for one in looked for anchor in one.anchors})
    for one in looked:
        yield text_row(one, texts, stated=is_in(one.versions, version))
    traced = wordings(near=True)
    lines = list(traced_lines(package, {anchor for one in traced for anchor in one.anchors}))
    for one in traced:
        place = one.place(dict.fromkeys(module for module, line in lines if one.search(line)))
        yield presence(
            "frame", one.name, stated=is_in(one.versions, version), found=bool(place), place=place
        )


def _request_lines() -> list[dict[str, Any]]:
    """Return the lines by which requests are known, those of a server below vLLM left out."""
    rows = tomllib.loads(
        Path(vllm_command.__file__).with_name("effects.toml").read_text(encoding="utf-8")
    )["request"]
    return [row for row in rows if row["source"].startswith(_OWN)]


def text_row(one: Looked, texts: list[Text], *, stated: bool) -> Row:
    held = [text for text in texts if any(text.may_hold(anchor) for anchor in one.anchors)]
    printing = dict.fromkeys(text.module for text in held if _prints(text, one))
    if printing:
        return presence("text", one.name, stated=stated, found=True, place=one.place(printing))
    near = [text.module for text in held if any(anchor in text.literal for anchor in one.anchors)]
    return Row(
        "text",
        one.name,
        "there" if stated else _ABSENT,
        _OTHERWISE if near and stated else _ABSENT,
        one.place(near),
    )


def _prints(text: Text, one: Looked) -> bool:
    filled = (line for line in text.filled() if any(anchor in line for anchor in one.anchors))
    return any(one.search(lead + line) for line in filled for lead in _LEADS)


def _longest(pattern: str) -> str:
    """Return the longest literal of a pattern."""
    plain = re.sub(r"\\(?=\W)|\(\?P?<\w+>", "", re.sub(r"\\[a-z]\+?|\[[^]]*\][^ ]*", "\0", pattern))
    return max(re.split(r"[\0()|?]", plain), key=len).strip()


def log_rows(package: Path, _version: str) -> Iterator[Row]:
    """Yield whether a line of its log loses its prefix, and whether that tells the process."""
    words = "The words of a line."
    form = _format_of(package / "logger.py")
    record = logging.makeLogRecord(
        {
            **_RECORD,
            "levelname": "INFO",
            "lineno": 133,
            "filename": "core.py",
            "process": 7,
            "msg": words,
        }
    )
    if form:
        line = logging.Formatter(form, "%m-%d %H:%M:%S").format(record)
    else:
        line = ""
    yield Row("log", "a line's words", words, peel(line).text, "vllm/logger.py")
    yield from _json_rows(package, words)
    inside = "(%(vllm_process_name)s pid=%(process)d)" in (form or "")
    prefixes = [text for text in printed_texts(package, {"pid="}) if "(\0 pid=\0)" in text.literal]
    if inside:
        named = line
    else:
        named = f"(EngineCore pid=7) {line}"
    if inside:
        place = "vllm/logger.py"
    else:
        place = next((text.module for text in prefixes), "")
    yield Row(
        "log",
        "a line's process",
        "EngineCore pid=7",
        (peel(named).process or _ABSENT) if place else _ABSENT,
        place,
    )


def _json_rows(package: Path, words: str) -> Iterator[Row]:
    """Yield whether a line that is written as JSON, where a version can, is read as its words."""
    path = package / "logging_utils" / "formatter.py"
    if path.is_file():
        named = [node.value for node in parsed(path).body if isinstance(node, ast.Assign)]
    else:
        named = []
    for form in (
        node.value
        for node in named
        if isinstance(node, ast.Constant) and "%(message)s" in str(node.value)
    ):
        record = {
            name: words if name == "message" else "7" for name in re.findall(r"%\((\w+)\)s", form)
        }
        yield Row(
            "log",
            "a JSON line's words",
            words,
            peel(json.dumps(record)).text,
            "vllm/logging_utils/formatter.py",
        )


def _format_of(path: Path) -> str | None:
    """Return the format of a log line, without the prefix that a user may set."""
    for node in parsed(path).body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "_FORMAT"
            and isinstance(node.value, ast.JoinedStr)
        ):
            return "".join(
                str(part.value) for part in node.value.values if isinstance(part, ast.Constant)
            )
    return None
