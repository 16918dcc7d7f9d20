"""A solved value that contradicts another known figure is not part of the plan."""

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident, SettingInForce
from oomguard.diagnosis import diagnose
from oomguard.remedy.from_log import contradiction

DESIRED = "Decrease GPU memory utilization or reduce GPU memory used by other processes."


def incident(kind="cuda_oom", settings=None, **facts) -> Incident:
    return Incident(
        kind,
        "boom",
        facts={name: Fact(name, value) for name, value in facts.items()},
        settings={
            name: SettingInForce(name, value, True, "command")
            for name, value in (settings or {}).items()
        },
    )


def why(name, value, base, **options) -> str | None:
    found = contradiction(name, value, base, **options)
    return None if found is None else found.why


@pytest.mark.parametrize(
    ("facts", "options", "said"),
    [
        ({}, {}, None),
        ({"model_weights_bytes": 19 * GIB}, {}, None),
        ({"model_weights_bytes": 21 * GIB}, {}, "less than the weights of one rank (21.00 GiB)"),
        (
            {"model_weights_bytes": 21 * GIB},
            {"by_model": True},
            "less than the weights of one rank (21.00 GiB)",
        ),
        ({"estimated_weights_bytes": 21 * GIB}, {}, None),  # an estimate may be off by a tenth
        (
            {"estimated_weights_bytes": 30 * GIB},
            {},
            "less than the weights of one rank (27.00 GiB)",
        ),
        ({"estimated_weights_bytes": 30 * GIB}, {"by_model": True}, None),
        ({"estimated_weights_bytes": 30 * GIB, "on_cpu": True}, {}, None),
    ],
)
def test_a_share_holds_the_weights_of_a_rank(facts, options, said):
    found = why(
        "gpu_memory_utilization", 0.5, incident(device_total_bytes=40 * GIB, **facts), **options
    )

    assert found is None if said is None else said in found


def test_the_weights_are_shared_among_the_stages_of_a_pipeline():
    facts = {"device_total_bytes": 40 * GIB, "estimated_weights_bytes": 40 * GIB}

    assert (
        why(
            "gpu_memory_utilization", 0.5, incident(settings={"pipeline_parallel_size": 2}, **facts)
        )
        is None
    )


def test_a_share_is_no_more_than_the_fullest_device_has_free():
    facts = {"device_total_bytes": 40 * GIB, "device_free_bytes": 18 * GIB}

    assert "18.00 GiB is free" in why(
        "gpu_memory_utilization", 0.5, incident("startup_free_memory_below_utilization", **facts)
    )
    assert (
        why("gpu_memory_utilization", 0.5, incident("cuda_oom", **facts)) is None
    )  # what is free after the KV cache


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "does not show"),
        ({"device_total_bytes": 40 * GIB}, "does not show"),
        ({"device_total_bytes": 40 * GIB, "gpu_memory_utilization_ratio": 0.7}, None),
        ({"device_total_bytes": 40 * GIB, "gpu_memory_utilization_ratio": 0.9}, "is free for it"),
        (
            {
                "device_total_bytes": 40 * GIB,
                "gpu_memory_utilization_ratio": 0.7,
                "initial_free_bytes": 28 * GIB,
            },
            "is free for it",
        ),
        (
            {
                "device_total_bytes": 40 * GIB,
                "kv_cache_memory_bytes": GIB,
                "model_weights_bytes": 20 * GIB,
            },
            None,
        ),
    ],
)
def test_larger_kv_cache_is_offered_only_if_it_fits(facts, said):
    base = incident("kv_cache_too_small_for_max_len", kv_cache_available_bytes=2 * GIB, **facts)
    found = why("kv_cache_memory_bytes", 8 * GIB, base)

    assert found is None if said is None else said in found
    assert why("kv_cache_memory_bytes", 2 * GIB, base) is None  # as large as the one it has


@pytest.mark.parametrize(("value", "is_against"), [(6143, True), (6144, False)])
def test_a_length_is_no_less_than_the_command_itself_asks_for(value, is_against):
    asked = {"max_model_len_tokens": 8192, "asked_input_tokens": 6000, "asked_output_tokens": 144}

    assert (why("max_model_len", value, incident(**asked)) is not None) == is_against
    assert why("max_model_len", value, incident(**{**asked, "max_model_len_tokens": 4096})) is None


def _start(free: dict[int, str], model: str, ranks: int) -> str:
    lines = [
        f"(APIServer pid=11) INFO 04-04 09:00:00 [utils.py:328] non-default args: {{'model': '{model}', "
    ]
    lines[0] += f"'tensor_parallel_size': {ranks}, 'gpu_memory_utilization': 0.88}}"
    for rank, size in free.items():
        lines.append(
            f"(Worker pid={20 + rank}) ERROR 04-04 09:00:09 [multiproc_executor.py:800] ValueError: Free memory on device "
            f"cuda:{rank} ({size}/47.4 GiB) on startup is less than desired GPU memory utilization (0.88, 41.71 GiB). {DESIRED}"
        )
    return "\n".join(lines) + "\n"


def test_of_several_ranks_the_one_with_least_free_memory_counts():
    (failed,) = diagnose(_start({0: "39.20", 1: "31.70", 2: "35.00"}, "example/m-7b", 4)).incidents

    assert failed.facts["device_free_bytes"].value == round(31.70 * GIB)
    (patch,) = failed.plan
    assert patch.new * 47.4 < 31.70


def test_more_ranks_replace_a_share_that_lacks_the_weights():
    (failed,) = diagnose(_start({0: "15.00", 1: "15.00"}, "example/m-20b", 2)).incidents

    (patch,) = failed.plan
    assert (patch.setting, patch.old, patch.new) == ("tensor_parallel_size", 2, 4)
    assert not patch.applicable
    (other,) = failed.alternatives
    assert (other.setting, other.new) == ("gpu_memory_utilization", None)
    assert "less than the weights" in other.why_not


def test_length_below_the_commands_requests_is_not_offered():
    log = (
        "$ vllm bench throughput --model example/m-8b --max-model-len 32768 --input-len 20000 --output-len 1000\n"
        "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, which "
        "is larger than the available KV cache memory (1.50 GiB). Based on the available memory, the estimated maximum model "
        "length is 12288. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n"
    )
    (failed,) = diagnose(log).incidents

    assert "max_model_len" not in {patch.setting for patch in failed.plan}
    assert "asks for requests of 21000 tokens" in next(
        other.why_not for other in failed.alternatives if other.setting == "max_model_len"
    )
