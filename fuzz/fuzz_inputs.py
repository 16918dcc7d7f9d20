# ruff: noqa: RUF001, PLC0415 (hostile texts: long lines and look-alike letters are the point; the package loads on use)
"""Bytes that a fuzzer chooses, read as recipes for hostile inputs: logs and rule files.

The recipe starts from a real-looking text (the tests inside the shipped signatures, wrappers of containers and
schedulers, healthy lines) and spoils it. Both fuzzers use it: hypothesis shrinks the bytes, atheris steers them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

MAX_LOG_CHARS = 16_384
MAX_RULE_CHARS = 20_000

T = TypeVar("T")

NASTY = (
    "\x00",
    "\x1b[31m",
    "\x1b[",
    "\x1b]0;title\x07",
    "\r",
    "\r\n",
    "\n\n\n",
    "\u2028",
    "\x85",
    "\x0c",
    "\u202e",
    "\ufeff",
    "\ud800",
    "é",
    "漢字",
    "🔥",
    "e\u0301",
    "\u200b",
    "%s%n",
    "{}",
    "{0}",
    "{tried_bytes:GiB}",
    "\\",
    "'",
    '"',
    "`",
    "</script>",
    "[/red]",
    "[bold",
    "$(x)",
    "../..",
    "None",
    "nan",
    "inf",
    "-0",
    "1e309",
    "9" * 400,
    "0x10",
    "٢",
    "½",
    "²",
    "(",
    "[",
    "<",
    "\\u0000",
    "\\n",
    "\t" * 20,
    " " * 200,
    "a" * 3000,
    "0" * 3000,
    "(" * 500,
    "[" * 500,
    "> " * 200,
    "Traceback (most recent call last):\n",
    "During handling of the above exception, another exception occurred:\n",
    "torch.OutOfMemoryError: ",
    "CUDA out of memory. ",
    "Tried to allocate ",
    "Tried to allocate 2.00 GiB. ",
    "(EngineCore pid=1) ",
    "[rank0]: ",
    "prompt: '",
    "```\n",
    '{"log":"',
    "Killed\n",
)
NUMBERS = (
    "0",
    "0.00",
    "0.0",
    "1",
    "2.00",
    "-3.79",
    "-0.0",
    "17179869184.00",
    "99999999999999999999",
    "1e309",
    "1e-400",
    "nan",
    "inf",
    ".",
    "..",
    "1.2.3",
    "1,024.00",
    "1 024",
    "٢.٠٠",
    "²",
    "",
    "9" * 400,
    "0." + "0" * 400 + "1",
    "0x7f",
    "1_000",
    "+5",
    "1.",
    ".5",
    "2,00",
)
UNITS = (
    "GiB",
    "MiB",
    "KiB",
    "TiB",
    "B",
    "bytes",
    "GB",
    "MB",
    "kB",
    "EiB",
    "gib",
    "",
    "GiBytes",
    "%",
    "tokens",
)
LINES = (
    "INFO 01-01 10:00:00 [gpu_worker.py:298] Free memory on device (21.92/23.69 GiB) on startup. Desired GPU memory utilization is (0.9, 21.32 GiB).",
    "INFO 01-01 10:00:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='m', max_seq_len=8192, tensor_parallel_size=2",
    "INFO 01-01 10:00:00 [utils.py:253] non-default args: {'model': 'm', 'max_model_len': 8192, 'gpu_memory_utilization': 0.9}",
    "INFO 01-01 10:00:00 [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 3.812 seconds",
    "INFO 01-01 10:00:00 [gpu_worker.py:298] Available KV cache memory: 4.71 GiB",
    "INFO 01-01 10:00:00 [logger.py:43] Received request cmpl-1: prompt: 'CUDA out of memory. Tried to allocate 2.00 GiB', params: SamplingParams(n=1)",
    'INFO:     10.0.0.1:50000 - "POST /v1/completions HTTP/1.1" 200 OK',
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    "Traceback (most recent call last):",
    '  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_model_runner.py", line 2102, in _dummy_run',
    "    hidden_states = self.model(input_ids)",
    "MemoryError",
    "Killed",
    "vllm serve m --max-model-len 8192 --gpu-memory-utilization 0.9",
    "Out of memory: Killed process 4121 (python3) total-vm:61231412kB, anon-rss:31222100kB, file-rss:1024kB",
    "      Reason:       OOMKilled",
)
WRAPPERS: tuple[tuple[str, str], ...] = (
    ("(EngineCore_DP0 pid=812) ERROR 01-01 10:00:00 [core.py:708] ", ""),
    ("(VllmWorker rank=1 pid=5) ERROR 01-01 10:00:00 [multiproc_executor.py:522] ", "\r"),
    ("[rank1]: ", ""),
    ('{"log":"', '\\n","stream":"stderr","time":"2025-10-21T08:11:02.1Z"}'),
    ("[pod/vllm-0/server] 2025-03-04T08:00:00.123456789Z ", ""),
    ("2025-03-04T08:00:00.123456789+01:00 stderr F ", ""),
    ("Mar 04 08:00:00 node17 vllm[4121]: ", ""),
    ("3: ", ""),
    ("vllm-1   | ", ""),
    ("> ", ""),
    ("E   ", ""),
    ("\x1b[31m", "\x1b[0m"),
    ("(RayWorkerWrapper pid=77, ip=10.0.0.1) ", " [repeated 3x across cluster]"),
)
RULE_NASTY = (
    "'''",
    '"""',
    "[[",
    "]]",
    "[[wording]]\n",
    "[[test]]\n",
    "[explain]\n",
    "= inf",
    "= nan",
    "= -0",
    "= 1979-05-27",
    "= []",
    "= {}",
    "= [[[[[[",
    "\x00",
    "\ufeff",
    "(?P<tried>",
    "(?P<nope>x)",
    "(a+)+$",
    "(?:a|aa)+$",
    "(.*)*x",
    "{1,99999999}",
    "{0,9999}{0,9999}",
    "\\1",
    "(?R)",
    "(?<=a*)",
    "\\p{L}",
    "(?i)",
    "[",
    "(",
    "\\",
    "\\U00110000",
    "x" * 5000,
    "(" * 3000,
    "1.0 / 0.0",
    "tried_bytes > 1.0 and ",
    " && ",
    "len('a')",
    "9 ** 9 ** 9",
    "'a' * 1000000",
    "{tried_bytes:GiB}",
    "{tried_bytes:nope}",
    "{",
    "}",
    "{}",
    "{0.__class__}",
    "\r",
    "\u202e",
    "9" * 5000,
    "0x",
    "true",
    "schema = 2\n",
    "kind = 3\n",
    "gpu_memory_utilization",
    "output-preserving",
    "changes-outputs",
    "unknown",
    "cuda_oom",
    'code = "OG201"\n',
    '= ""',
    "= 99999999999999999999",
)


class Recipe:
    """The fuzzer's bytes, taken one decision at a time; after the last byte every decision is the first choice."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """An integer from 0 to ``below`` - 1."""
        width = 1 if below <= 256 else 3
        taken = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(taken, "big") % below if below else 0

    def choose(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.number(len(options))]


@cache
def seeds() -> tuple[str, ...]:
    """Real-looking logs: the tests inside the shipped signatures."""
    from oomguard.rules.rule_files import load_rules

    return tuple(
        str(test["log"]) for signature in load_rules().signatures for test in signature.tests
    )


@cache
def rule_seeds() -> tuple[str, ...]:
    """The shipped rule and signature files, as text."""
    from oomguard.rules.rule_files import shipped_root

    return tuple(
        path.read_text(encoding="utf-8") for path in sorted(shipped_root().rglob("*.toml"))
    )


def log_text(data: bytes) -> str:
    """A log: seeds, wrapped and joined, then spoiled."""
    recipe = Recipe(data)
    if recipe.number(16) == 15:  # the bytes themselves
        return data.decode("utf-8", "replace" if len(data) % 2 else "surrogateescape")
    pieces = [_piece(recipe) for _ in range(1 + recipe.number(4))]
    text = "\n".join(pieces) + "\n"
    for _ in range(recipe.number(10)):
        text = recipe.choose(_SPOILERS)(recipe, text)[:MAX_LOG_CHARS]
    return text


def log_bytes(data: bytes) -> bytes:
    """The same as bytes, some of them no UTF-8."""
    raw = bytearray(log_text(data).encode("utf-8", "surrogatepass"))
    for byte in data[-3:]:
        if raw and byte % 3 == 0:
            raw[byte * 97 % len(raw)] = 128 + byte // 2
    return bytes(raw)


def rule_file(data: bytes) -> bytes:
    """A rule file: a shipped one, spoiled."""
    recipe = Recipe(data)
    if recipe.number(16) == 15:
        return data
    text = recipe.choose(rule_seeds())
    for _ in range(1 + recipe.number(4)):
        text = recipe.choose(_RULE_SPOILERS)(recipe, text)[:MAX_RULE_CHARS]
    return text.encode("utf-8", "surrogatepass")


def _piece(recipe: Recipe) -> str:
    source = recipe.number(3)
    text = recipe.choose(LINES) if source == 0 else recipe.choose(seeds())
    if recipe.number(2):
        text = _other_numbers(recipe, text)
    if recipe.number(2):
        before, after = recipe.choose(WRAPPERS)
        text = "\n".join(before + line + after for line in text.splitlines())
    return text


def _other_numbers(recipe: Recipe, text: str) -> str:
    found = list(re.finditer(r"-?\d[\d.]*( [KMGT]?i?B\b| bytes)?", text))
    if not found:
        return text
    for _ in range(1 + recipe.number(3)):
        match = recipe.choose(found)
        size = recipe.choose(NUMBERS) + (f" {recipe.choose(UNITS)}" if match.group(1) else "")
        text = text.replace(match.group(), size, 1)
    return text


def _place(recipe: Recipe, text: str) -> int:
    return recipe.number(len(text) + 1)


def _insert(recipe: Recipe, text: str, words: Sequence[str] = NASTY) -> str:
    at = _place(recipe, text)
    return text[:at] + recipe.choose(words) + text[at:]


def _cut(recipe: Recipe, text: str) -> str:
    at = _place(recipe, text)
    return text[:at] if recipe.number(2) else text[at:]


def _delete(recipe: Recipe, text: str) -> str:
    at = _place(recipe, text)
    return text[:at] + text[at + 1 + recipe.number(64) :]


def _splice(recipe: Recipe, text: str) -> str:
    other = recipe.choose(seeds())
    return text[: _place(recipe, text)] + other[_place(recipe, other) :]


def _insert_whole(recipe: Recipe, text: str) -> str:
    at = _place(recipe, text)
    return text[:at] + _piece(recipe) + text[at:]


def _flip(recipe: Recipe, text: str) -> str:
    if not text:
        return text
    at = recipe.number(len(text))
    return text[:at] + chr(ord(text[at]) ^ 1 << recipe.number(8)) + text[at + 1 :]


def _wrap(recipe: Recipe, text: str) -> str:
    width = 1 + recipe.number(120)
    ending = recipe.choose(("\n", "\r\n", "\n    ", "\r"))
    return ending.join(text[i : i + width] for i in range(0, len(text), width))


def _repeat(recipe: Recipe, text: str) -> str:
    lines = text.split("\n")
    at = recipe.number(len(lines))
    lines[at:at] = [lines[at]] * recipe.number(200)
    return "\n".join(lines)


def _join_lines(recipe: Recipe, text: str) -> str:
    return text.replace("\n", recipe.choose((" ", "", "\r", "\\n", "\u2028")))


def _shuffle_lines(recipe: Recipe, text: str) -> str:
    lines = text.split("\n")
    for _ in range(min(8, len(lines))):
        a, b = recipe.number(len(lines)), recipe.number(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


def _change_case(recipe: Recipe, text: str) -> str:
    return text.upper() if recipe.number(2) else text.swapcase()


def _rule_insert(recipe: Recipe, text: str) -> str:
    return _insert(recipe, text, RULE_NASTY)


def _rule_value(recipe: Recipe, text: str) -> str:
    """Another value for one of the keys: another type, most often."""
    keys = list(re.finditer(r"(?m)^(\w+) *= *(.*)$", text))
    if not keys:
        return text
    key = recipe.choose(keys)
    value = recipe.choose(
        (
            "1",
            "-1",
            "true",
            '""',
            '"x"',
            "[]",
            "{}",
            "[1]",
            "{a = 1}",
            "1.5",
            "inf",
            "nan",
            "1979-05-27",
            '"' + "9" * 300 + '"',
            "'''(a+)+$'''",
            "'''(?P<tried>[\\d.]+ GiB){1,99999}'''",
            '"tried_bytes > nope"',
            '"tried_bytes / 0.0 > 1.0"',
            "[[[[1]]]]",
            '["cuda_oom", 3]',
        )
    )
    return text[: key.start(2)] + value + text[key.end(2) :]


def _rule_line(recipe: Recipe, text: str) -> str:
    """One line gone, or there twice."""
    lines = text.split("\n")
    at = recipe.number(len(lines))
    lines[at : at + 1] = [lines[at]] * recipe.choose((0, 2))
    return "\n".join(lines)


def _rule_splice(recipe: Recipe, text: str) -> str:
    other = recipe.choose(rule_seeds()).split("\n")
    lines = text.split("\n")
    return "\n".join(lines[: recipe.number(len(lines) + 1)] + other[recipe.number(len(other)) :])


_SPOILERS: tuple[Callable[[Recipe, str], str], ...] = (
    _insert,
    _cut,
    _delete,
    _splice,
    _insert_whole,
    _flip,
    _wrap,
    _repeat,
    _join_lines,
    _shuffle_lines,
    _change_case,
    _other_numbers,
    _insert,
)
_RULE_SPOILERS: tuple[Callable[[Recipe, str], str], ...] = (
    _rule_value,
    _rule_value,
    _rule_insert,
    _rule_insert,
    _rule_line,
    _rule_splice,
    _delete,
    _flip,
    _cut,
)
