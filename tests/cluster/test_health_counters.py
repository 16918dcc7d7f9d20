"""The rows of /metrics that tell of an engine, as vLLM 0.32 and 0.8.5 print them."""

from __future__ import annotations

from oomguard.cluster.health import read_counters
from oomguard.engines.server import serving_names

NAMES = serving_names("vllm").metrics
TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="./tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="./tiny"} 0.0
vllm:engine_sleep_state{engine="0",model_name="./tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="./tiny",sleep_state="weights_offloaded"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="./tiny"} 0.002051282051282022
vllm:generation_tokens_total{engine="0",model_name="./tiny"} 3005.0
vllm:generation_tokens_created{engine="0",model_name="./tiny"} 1.79564307521271e+09
vllm:request_success_total{engine="0",finished_reason="abort",model_name="./tiny"} 4.0
python_gc_objects_collected_total{generation="0"} 17251.0
"""


def test_running_requests_and_step_effects_are_read_per_engine():
    (engine,) = read_counters(TEXT, NAMES).values()
    assert engine.running == 1.0
    assert not engine.sleeps
    assert set(engine.progress.values()) == {1.0, 0.0, 0.002051282051282022, 3005.0}


def test_what_the_front_counts_alone_is_no_progress():
    assert not any("abort" in name for name in read_counters(TEXT, NAMES)["0"].progress)


def test_an_engine_that_was_put_to_sleep_is_told():
    asleep = TEXT.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    assert read_counters(asleep, NAMES)["0"].sleeps


def test_ranks_are_told_apart():
    both = TEXT + TEXT.replace('engine="0"', 'engine="1"').replace("running{", "running{", 1)
    assert sorted(read_counters(both, NAMES)) == ["0", "1"]


def test_versions_without_an_engine_label_are_one_engine():
    old = 'vllm:num_requests_running{model_name="a}b\\"c"} 2.0\nvllm:gpu_cache_usage_perc{model_name="a"} 0.5\n'
    (engine,) = read_counters(old, NAMES).values()
    assert (engine.running, len(engine.progress)) == (2.0, 2)


def test_the_metrics_of_another_server_are_none():
    assert (
        read_counters('# HELP up\nup 1\nnode_cpu_seconds_total{cpu="0"} 12\n<html>\n', NAMES) == {}
    )
