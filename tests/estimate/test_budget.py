"""The parts of a budget overlap nowhere, never exceed the device, and leave out what contradicts itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import KINDS, Budget, Incident
from oomguard.diagnosis import diagnose
from oomguard.estimate.budget import budget_of_start
from oomguard.estimate.printed_budget import derive

_FIGURES = (
    "device_total_bytes",
    "device_free_bytes",
    "process_in_use_bytes",
    "other_process_in_use_bytes",
    "allocated_bytes",
    "reserved_total_bytes",
    "reserved_unallocated_bytes",
    "private_pool_bytes",
    "non_torch_bytes",
    "model_weights_bytes",
    "peak_activation_bytes",
    "cudagraph_bytes",
    "kv_cache_available_bytes",
    "desired_bytes",
    "consumed_bytes",
    "current_free_bytes",
    "initial_free_bytes",
    "tried_bytes",
    "allowed_bytes",
)


def _sizes(budget: Budget) -> dict[str, float]:
    return {part.name: round(part.bytes / GIB, 2) for part in budget.parts}


def _budget(log: str) -> Budget:
    return diagnose(log).incidents[0].budget


def _message(text: str) -> str:
    return f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. {text}"


def test_weights_are_a_part_of_the_tensors():
    log = (
        "INFO 05-05 10:00:00 model_runner.py:1115] Loading model weights took 9.2000 GB\n"
        "ERROR 05-05 10:01:00 engine.py:160] OutOfMemoryError('CUDA out of memory. Tried to allocate 700.00 MiB. GPU 0 has a "
        "total capacity of 16.00 GiB of which 400.00 MiB is free. Process 5005 has 15.60 GiB memory in use. Of the allocated "
        "memory 15.00 GiB is allocated by PyTorch, and 128.00 MiB is reserved by PyTorch but unallocated.')\n"
    )

    (incident,) = diagnose(log).incidents
    budget = incident.budget

    assert incident.phase == "decode"  # the loop of V0's engine process logs the exception's repr
    assert _sizes(budget) == {
        "weights": 9.2,
        "tensors besides the weights": 5.8,
        "reserved by torch, unused": 0.12,
        "non-torch": 0.47,
        "free": 0.39,
    }
    assert budget.conflict is None


def test_private_pools_are_a_part_of_the_tensors():
    text = (
        "GPU 1 has a total capacity of 40.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has "
        "38.90 GiB memory in use. Of the allocated memory 36.00 GiB is allocated by PyTorch, with 2.00 GiB allocated in private "
        "pools (e.g., CUDA Graphs), and 1.50 GiB is reserved by PyTorch but unallocated."
    )

    assert _sizes(_budget(_message(text))) == {
        "private pools": 2.0,
        "tensors besides the private pools": 34.0,
        "reserved by torch, unused": 1.5,
        "non-torch": 1.4,
        "free": 1.0,
    }


# The context, NCCL and the graphs of a rank: more than any fixed allowance.
_ONLY_ONE = (
    "GPU 3 has a total capacity of 60.00 GiB of which 1.40 GiB is free. Process 4444 has 58.55 GiB memory in use. Of the "
    "allocated memory 50.00 GiB is allocated by PyTorch, and 2.25 GiB is reserved by PyTorch but unallocated."
)
_TWO = (
    "GPU 0 has a total capacity of 60.00 GiB of which 1.40 GiB is free. Process 99 has 10.00 GiB memory in use. Process 4444 "
    "has 48.55 GiB memory in use. Of the allocated memory 40.00 GiB is allocated by PyTorch, and 2.25 GiB is reserved by "
    "PyTorch but unallocated."
)


def test_the_only_process_on_the_device_is_the_failed_one():
    incident = diagnose(_message(_ONLY_ONE)).incidents[0]

    assert _sizes(incident.budget) == {
        "tensors": 50.0,
        "reserved by torch, unused": 2.25,
        "non-torch": 6.3,
        "free": 1.4,
    }
    assert "colocated_process" not in {cause.id for cause in incident.causes}
    assert "other_process_in_use_bytes" not in incident.facts


def test_the_failed_process_is_taken_off_a_list_of_several():
    budget = diagnose(_message(_TWO)).incidents[0].budget

    assert _sizes(budget) == {
        "tensors": 40.0,
        "reserved by torch, unused": 2.25,
        "non-torch": 6.3,
        "other processes": 10.0,
        "free": 1.4,
    }


@pytest.mark.parametrize(
    ("text", "conflict", "kept"),
    [
        (
            (
                "GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Of the allocated memory 11.30 GiB is allocated by "
                "PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated."
            ),
            "11.30 GiB in tensors, but the device has 8.00 GiB",
            {},
        ),
        (
            (
                "GPU 0 has a total capacity of 12.00 GiB of which 3.00 GiB is free. Including non-PyTorch memory, this process has "
                "17179869184.00 GiB memory in use. Of the allocated memory 7.00 GiB is allocated by PyTorch, and 1.00 GiB is "
                "reserved by PyTorch but unallocated."
            ),
            "17179869184.00 GiB in use by this process, but the device has 12.00 GiB",
            {"tensors": 7.0, "reserved by torch, unused": 1.0, "free": 3.0},
        ),
        (
            (
                "GPU 0 has a total capacity of 12.00 GiB of which 3.00 GiB is free. Including non-PyTorch memory, this process has "
                "0 bytes memory in use. Of the allocated memory 7.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by "
                "PyTorch but unallocated."
            ),
            "0.00 GiB in use by this process, but 7.00 GiB in its tensors",
            {"tensors": 7.0, "reserved by torch, unused": 1.0, "free": 3.0},
        ),
        (
            (
                "GPU 0 has a total capacity of 30.00 GiB of which 9.00 GiB is free. Including non-PyTorch memory, this process has "
                "26.00 GiB memory in use. Of the allocated memory 24.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by "
                "PyTorch but unallocated."
            ),
            "26.00 GiB held by this process and 9.00 GiB free, 35.00 GiB together, but the device has 30.00 GiB",
            {},
        ),
    ],
)
def test_contradicting_numbers_are_named_and_have_no_part(text, conflict, kept):
    budget = _budget(_message(text))

    assert budget.conflict == conflict
    assert _sizes(budget) == kept


def test_a_cap_below_the_device_is_no_contradiction():
    text = (
        "GPU 0 has a total capacity of 40.00 GiB of which 25.00 GiB is free. 14.00 GiB allowed; Of the allocated memory "
        "13.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
    )

    budget = _budget(_message(text))

    assert budget.conflict is None
    assert _sizes(budget) == {"tensors": 13.0, "reserved by torch, unused": 0.5, "free": 25.0}


def test_memory_free_at_the_start_is_not_free_after_weights():
    facts = {
        "device_total_bytes": 24 * GIB,
        "device_free_bytes": 22 * GIB,
        "model_weights_bytes": 19 * GIB,
        "kv_cache_available_bytes": -GIB,
    }

    budget = derive(
        Incident("kv_cache_none_left", "", facts={n: Fact(n, v) for n, v in facts.items()})
    ).budget

    assert _sizes(budget) == {"in use at the start": 2.0, "weights": 19.0}


def test_engine_above_the_device_has_no_part_above_it():
    facts = {
        "device_total_bytes": 80 * GIB,
        "gpu_memory_utilization_ratio": 0.9,
        "kv_cache_available_bytes": -40 * GIB,
        "cudagraph_bytes": 90 * GIB,
        "model_weights_bytes": 15 * GIB,
    }

    budget = derive(
        Incident("kv_cache_none_left", "", facts={n: Fact(n, v) for n, v in facts.items()})
    ).budget

    assert _sizes(budget) == {"weights": 15.0}
    assert budget.conflict is None


def test_the_host_s_memory_is_no_part_of_a_device():
    log = (
        "INFO 05-05 10:00:00 model_runner.py:1115] Loading model weights took 9.2000 GB\n"
        "Out of memory: Killed process 812 (python3) total-vm:62371200kB, anon-rss:1024kB, file-rss:2048kB, shmem-rss:0kB\n"
    )

    assert _budget(log) == Budget()


_BYTES = st.one_of(st.integers(0, 200 * GIB), st.sampled_from([0, 2**64, -GIB, 1, 80 * GIB]))


@settings(deadline=None, max_examples=400)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    sizes=st.dictionaries(st.sampled_from(_FIGURES), _BYTES),
    total=st.integers(GIB, 200 * GIB),
    ratio=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_no_printed_numbers_give_more_than_the_device(kind, sizes, total, ratio):
    facts = {name: Fact(name, size, slack=0.005 * GIB) for name, size in sizes.items()}
    facts["device_total_bytes"] = Fact("device_total_bytes", total, slack=0.005 * GIB)
    if ratio is not None:
        facts["gpu_memory_utilization_ratio"] = Fact("gpu_memory_utilization_ratio", ratio)

    for budget in (derive(Incident(kind, "", facts=facts)).budget, budget_of_start(facts)):
        assert sum(part.bytes for part in budget.parts) <= total
        assert all(part.bytes > 0 for part in budget.parts)
        assert len({part.name for part in budget.parts}) == len(budget.parts)


@settings(deadline=None)
@given(
    tensors=st.floats(0.1, 1.0),
    weights=st.floats(0.0, 1.0),
    pools=st.floats(0.0, 1.0),
    unused=st.floats(0.0, 1.0),
    context=st.floats(0.0, 1.0),
    others=st.floats(0.0, 1.0),
)
def test_true_numbers_never_contradict_each_other(tensors, weights, pools, unused, context, others):
    """A device is filled from its total down, so that every figure is true."""
    left = total = 80 * GIB
    sizes = {"device_total_bytes": total}

    def take(share: float) -> int:
        nonlocal left
        taken = int(left * share)
        left -= taken
        return taken

    sizes["allocated_bytes"] = allocated = take(tensors)
    sizes["reserved_unallocated_bytes"] = take(unused)
    sizes["process_in_use_bytes"] = allocated + sizes["reserved_unallocated_bytes"] + take(context)
    sizes["other_process_in_use_bytes"] = take(others)
    sizes["device_free_bytes"] = left
    sizes["model_weights_bytes"] = int(allocated * weights)
    sizes["private_pool_bytes"] = int((allocated - sizes["model_weights_bytes"]) * pools)

    facts = {name: Fact(name, size) for name, size in sizes.items()}
    budget = derive(Incident("cuda_oom", "", facts=facts)).budget

    assert budget.conflict is None
    assert sum(part.bytes for part in budget.parts) == total
