"""Standard output and error of one run, read together: what one tells is known to what the other prints later."""

from __future__ import annotations

from oomguard.diagnosis import default_rules
from oomguard.scan.scan import Scanner
from oomguard.scan.source import Line

START = "(EngineCore pid=7) INFO 11-21 07:14:43 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', dtype=torch.bfloat16, max_seq_len=32768"
ECHO = "INFO 11-21 07:14:37 [utils.py:233] non-default args: {'model': 'm', 'enforce_eager': True}"
LOGGED = "(EngineCore pid=7) ERROR 11-21 07:14:52 [core.py:1510] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
RAW = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
)


def test_stderr_traceback_belongs_to_the_start_on_stdout():
    scanner = Scanner(default_rules())
    scanner.push(Line(1, 0, ECHO), "stdout")
    scanner.push(Line(2, 0, START), "stdout")
    scanner.push(Line(3, 0, LOGGED), "stdout")
    for number in range(1, 40):
        scanner.push(
            Line(number, 0, RAW if number == 2 else '  File "core.py", line 1, in run'), "stderr"
        )

    (incident,) = scanner.diagnosis("").incidents

    assert incident.start == 1
    assert incident.repeated == 2
    assert incident.settings_complete
    assert incident.facts["gpu_memory_utilization_set"].value is False


def test_a_silent_stream_does_not_hold_the_others_up_for_ever():
    scanner = Scanner(default_rules())
    scanner.push(Line(1, 0, LOGGED), "stderr")
    for number in range(1, 2000):
        scanner.push(
            Line(number, 0, f"(EngineCore pid=7) INFO GPU KV cache size: {number} tokens"), "stdout"
        )

    assert len(scanner._open) <= 201
