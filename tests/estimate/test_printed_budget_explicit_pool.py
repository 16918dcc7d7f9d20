"""A KV cache size that something unseen sets over the one that was given."""

from __future__ import annotations

from oomguard.core.facts import GIB
from oomguard.diagnosis import diagnose_lines
from oomguard.scan.source import Line

LOG = """INFO 11-23 22:39:15 [utils.py:233] non-default args: {{'model': './m', 'max_model_len': 64000, 'kv_cache_memory_bytes': {given}}}
(Worker pid=7) INFO 11-23 22:39:26 [cpu_worker.py:260] Explicitly set ({printed}/23.54) GiB for KV cache on node 0.
(EngineCore pid=6) ERROR 11-23 22:39:26 [core.py:1510] ValueError: To serve at least one request with the model's max seq len \
(64000), (1.46 GiB KV cache is needed, which is larger than the available KV cache memory ({left} GiB). Based on the available \
memory, the estimated maximum model length is 43520. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` \
when initializing the engine.
"""


def failed(given: int, printed: str, left: str = "1.0"):
    text = LOG.format(given=given, printed=printed, left=left)
    (incident,) = diagnose_lines(
        Line(n, 0, line) for n, line in enumerate(text.splitlines(), 1)
    ).incidents
    return incident


def test_printed_size_counts_over_the_configured_one():
    incident = failed(4 * GIB, "1.0")

    assert "needs 1.46 GiB of KV cache, but 1.00 GiB is available" in incident.headline
    assert incident.number("kv_cache_memory_bytes") == GIB
    assert incident.settings["kv_cache_memory_bytes"].value == GIB
    assert [cause.rule for cause in incident.causes] == ["OG201", "OG223"]


def test_no_byte_count_is_offered_where_one_had_no_effect():
    incident = failed(4 * GIB, "1.0")

    offered = {change.setting: change.new for change in (*incident.plan, *incident.alternatives)}
    assert offered["max_model_len"] == 43520
    assert offered.get("kv_cache_memory_bytes") is None


def test_a_size_that_differs_by_rounding_had_its_effect(subtests):
    for given in [GIB, GIB - 20_000_000, GIB + 20_000_000]:
        with subtests.test(given=given):
            incident = failed(given, "1.0")

            assert incident.number("kv_cache_memory_bytes") == given
            assert "ignored_kv_cache_bytes" not in incident.facts
