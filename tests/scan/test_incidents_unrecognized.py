"""Out-of-memory failures in a wording that no signature has, and reports that show no log."""

from __future__ import annotations

import pytest

from oomguard.diagnosis import default_rules, diagnose
from oomguard.scan.scan import scan
from oomguard.scan.source import Line

NOTE = "This reads like a report; diagnose the log itself"
ARENA = "2026-02-03 10:12:44 ERROR inference.arena: grow refused: out of device memory\n"
FRAMES = (
    'Traceback (most recent call last):\n  File "/srv/run.py", line 3, in step\n    arena.grow(n)\n'
)


def kinds(text: str) -> list[str]:
    return [incident.kind for incident in diagnose(text).incidents]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{FRAMES}arena.ArenaOutOfMemoryError: pool 3\n", "other"),
        (f"{FRAMES}arena.errors.DeviceOutOfMemory\n", "other"),
        (f"{FRAMES}ArenaError: pool 3 ran out of device memory\n", "cuda_oom"),
        (f"{FRAMES}ArenaError: the NPU is out of memory\n", "npu_oom"),
        ("[2026-04-12 23:53:54] ERROR: Looks like the system ran out of memory\n", "host_oom"),
        (ARENA, "cuda_oom"),
        ("CRITICAL pool: out of memory\n", "other"),
        ("ts=2026-02-03 level=error msg='pool: out of memory'\n", "other"),
        ('{"level": "error", "ts": "2026-02-03", "msg": "pool: out of host memory"}\n', "host_oom"),
    ],
)
def test_a_traceback_s_end_and_an_error_s_line_are_failures(text: str, kind: str) -> None:
    assert kinds(text) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "arena.ArenaOutOfMemoryError: pool 3\n",  # no traceback
        f"{FRAMES}KeyError: 'out'\narena.ArenaOutOfMemoryError is not handled\n",
        f"{FRAMES}KeyError: 'x'\n",
        "2026-02-03 10:12:44 INFO inference.arena: out of device memory\n",
        "2026-02-03 10:12:44 WARNING inference.arena: out of device memory\n",
        "2026-02-03 10:12:44 ERROR inference.arena: batch refused, it would run out of memory\n",
        "2026-02-03 10:12:44 ERROR inference.arena: 64 rows ran out of memory, retrying with 32\n",
        "2026-02-03 10:12:44 ERROR inference.arena: died, but was not out of memory\n",
        "2026-02-03 10:12:44 ERROR api: bad request: prompt: 'why is my server out of memory'\n",
        "grow refused: out of device memory\n",
        "| out-of-memory type, and an ERROR, CRITICAL or FATAL line that says\n",
    ],
)
def test_other_lines_that_say_it_are_none(text: str) -> None:
    assert kinds(text) == []


def test_it_is_reported_with_its_certainty_and_not_acted_on() -> None:
    (found,) = diagnose(ARENA).incidents

    assert found.certainty_ratio == 0.8
    assert any("No signature matches its wording" in text for text in found.unknown)
    assert all(cause.confidence <= 0.8 for cause in found.causes)
    assert all(patch.blocked_by for patch in found.plan)


def test_the_first_line_of_several_is_the_failure() -> None:
    (found,) = diagnose("a line\n" + ARENA * 3).incidents

    assert found.location.line == 2


def test_a_wording_of_a_signature_takes_its_place() -> None:
    (found,) = diagnose("RuntimeError: CUDA error: out of memory\n" + ARENA).incidents

    assert (found.location.line, found.certainty_ratio) == (1, None)


def test_only_a_scan_that_asks_for_it_reports_it() -> None:
    lines = [Line(1, 0, ARENA)]

    assert scan(lines, default_rules()).incidents == ()
    assert len(scan(lines, default_rules(), unrecognized=True).incidents) == 1


@pytest.mark.parametrize(
    "text",
    [
        "I tried the small model on a 3090 and it immediately ran out of memory.",
        "With a longer prompt I keep hitting OOM on my 16 GB card.\nWhat can I change?",
        "OOM on a 3080\n\nHi, the second prompt of the sample OOMs every time. Is there something to set?",
    ],
)
def test_a_report_without_a_log_gets_one_sentence(text: str) -> None:
    found = diagnose(text)

    assert (found.incidents, found.notes) == ((), (NOTE,))


@pytest.mark.parametrize(
    "text",
    [
        "I tried the small model and it works. How large may a batch be?",
        "2026-02-03 10:12:44 INFO my worker is not out of memory today\n",
        "def is_oom(text):\n    return 'out of memory' in text\n",
        '{"role": "user", "content": "I keep running out of memory on my card"}\n',
    ],
)
def test_another_text_gets_none(text: str) -> None:
    assert diagnose(text).notes == ()


def test_a_report_with_the_message_gets_the_failure() -> None:
    found = diagnose(
        "With a longer prompt I keep hitting OOM on my card:\n\nRuntimeError: CUDA error: out of memory\n"
    )

    assert [incident.kind for incident in found.incidents] == ["cuda_oom"]
    assert NOTE not in found.notes
