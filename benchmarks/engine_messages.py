"""Figure: what SGLang, transformers and lmdeploy can print of memory, in three versions each, and
what is said of it.

The texts of data/engine_messages.toml are looked for in the sources of released wheels, their holes
are filled, and each is diagnosed alone, behind a traceback's end or in the engine's form of a log
line. TensorRT-LLM's texts and those of lmdeploy's C++ engine stand in the file as a whole: no wheel
here holds those sources. Wheels are kept unzipped in .sources; with -v each miss is listed.
"""

import argparse
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oomguard.diagnosis import diagnose
from support.figure import conclude, skip
from support.vllm_texts import Text, printed_texts
from support.wheels import package_of

HERE = Path(__file__).parent
DATA = HERE / "data" / "engine_messages.toml"
CACHE = HERE.parent / ".sources"
RECALL_GOAL = 0.99
FALSE_ALARM_GOAL = 0.02
LEVELS = {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "FATAL"}
LOG_LINES = {
    "sglang": "[2026-01-01 00:00:00 TP0] {text}",
    "transformers": "[transformers] {text}",
    "lmdeploy": "2026-01-01 00:00:00,000 - lmdeploy - {level} - engine.py:12 - {text}",
}


@dataclass(frozen=True)
class Message:
    """One message of one version of an engine, as a log would hold it; ``kinds`` is empty where
    nothing failed for memory.
    """

    engine: str
    version: str
    log: str
    kinds: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list every miss")
    options = parser.parse_args()
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    messages: list[Message] = []
    for engine, rows in data.items():
        for version in rows.get("versions", ()):
            try:
                package = package_of(f"{engine}=={version}", engine, CACHE / engine)
            except subprocess.CalledProcessError as error:
                skip(
                    f"{engine} {version} is not to be had: {error.stderr.strip().splitlines()[-1]}"
                )
            messages += rendered(engine, version, package, rows)
        if "versions" not in rows:
            messages += [Message(engine, "", log, tuple(kinds)) for log, *kinds in rows["failures"]]
            messages += [Message(engine, "", log, ()) for log in rows["others"]]
    judge(messages, verbose=options.verbose)


def rendered(engine: str, version: str, package: Path, rows: dict) -> Iterator[Message]:
    """Yield each text of a version once, filled."""
    listed = [
        *((row[0], row[1], tuple(row[2:])) for row in rows["failures"]),
        *((*row, ()) for row in rows["others"]),
    ]
    texts = printed_texts(package, {anchor for _form, anchor, _kinds in listed})
    for form, anchor, kinds in listed:
        logs = {as_log(engine, form, text) for text in texts if anchor in text.literal}
        yield from (Message(engine, version, log, kinds) for log in sorted(logs))


def as_log(engine: str, form: str, text: Text) -> str:
    """Return a text as a log holds it: a printed line, a line of the engine's log, or the end of a
    traceback.
    """
    filled = next(text.filled())
    if form == "print":
        return filled
    if form in LEVELS:
        return LOG_LINES[engine].format(level=form, text=filled)
    frame = (
        f'Traceback (most recent call last):\n  File "/site-packages/{text.module}", line 100, in '
        "run\n    self.step()"
    )
    return f"{frame}\n{form}: {filled}"


def judge(messages: list[Message], *, verbose: bool) -> None:
    """Diagnose each message and print the figures, one line for an engine's version."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for message in messages:
        count = counts.setdefault((message.engine, message.version), Counter())
        kinds = [incident.kind for incident in diagnose(message.log).incidents if incident.is_oom]
        if message.kinds:
            group = "failures"
        else:
            group = "others"
        right = bool(kinds) == bool(message.kinds)
        count.update(
            {group: 1, f"{group} right": right, "kind": bool(set(kinds) & set(message.kinds))}
        )
        if verbose and (not right or (message.kinds and not set(kinds) & set(message.kinds))):
            print(
                f"  {message.engine} {message.version} {kinds} for {list(message.kinds)}: "
                f"{message.log[-160:]!r}"
            )
    for (engine, version), count in counts.items():
        print(
            f"{engine:12} {version:8} found {count['failures right']:3} of {count['failures']:3}, "
            f"kind {count['kind']:3};"
            f" taken for one {count['others'] - count['others right']:2} of {count['others']:3}"
        )
    all_of = sum(counts.values(), Counter())
    recall = all_of["failures right"] / all_of["failures"]
    false = 1 - all_of["others right"] / all_of["others"]
    kind = all_of["kind"] / all_of["failures"]
    conclude(
        f"messages of four engines: {recall:.1%} of {all_of['failures']} failures found (goal >= "
        f"{RECALL_GOAL:.0%}),"
        f" kind {kind:.1%}, {false:.1%} of {all_of['others']} others taken for one (goal <= "
        f"{FALSE_ALARM_GOAL:.0%})",
        met=recall >= RECALL_GOAL and false <= FALSE_ALARM_GOAL,
    )


if __name__ == "__main__":
    main()
