"""What the engine noted itself is taken where its output went into a file, and nowhere else."""

from __future__ import annotations

from oomguard.analyst.output import ParsedOutput
from oomguard.diagnosis import default_rules
from oomguard.scan.scan import Scanner, scan
from oomguard.scan.source import Line
from support.each import each

WORDS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
NOTED = (Line(1, 0, f"(EngineCore pid=7) ERROR 11-24 21:00:00 [core.py:1510] {WORDS}"),)


@each(
    ("output", "kinds"),
    [
        ("", ["kv_cache_none_left"]),
        ("starting\n", ["kv_cache_none_left"]),
        (f"{WORDS}\nKeyError: 'text'\n", []),
    ],
)
def test_engines_notes_count_if_its_words_are_not_in_the_output(output, kinds):
    rules = default_rules()
    heard = ParsedOutput(Scanner(rules), tail=output)
    found = heard.or_engine_log(scan((), rules), NOTED, rules, {})
    assert [incident.kind for incident in found.incidents] == kinds


def test_a_failure_that_was_heard_stands():
    rules = default_rules()
    own = scan(
        [Line(1, 0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")],
        rules,
    )
    assert ParsedOutput(Scanner(rules)).or_engine_log(own, NOTED, rules, {}) is own
