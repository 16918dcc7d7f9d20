"""Which of several ways to load weights is taken where more than one is enough."""

from __future__ import annotations

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Effect, Incident
from oomguard.remedy.failed_call import LighterWeights, LoadModel, Weights
from oomguard.remedy.policy import Policy

EIGHT = LighterWeights("quantization", "8bit", "load_in_8bit=True", 3 * GIB)
FOUR = LighterWeights("quantization", "4bit", "load_in_4bit=True", 2 * GIB)


def chosen(device_gib):
    weights = Weights(
        total_bytes=10 * GIB, largest_block_bytes=GIB, work_bytes=GIB, work_tokens=1024
    )
    model = LoadModel(weights, 0, None, why_not_on_host="it is one layer", lighter=(EIGHT, FOUR))
    incident = Incident(
        "cuda_oom",
        "boom",
        facts={"device_total_bytes": Fact("device_total_bytes", device_gib * GIB)},
    )
    patches = model.solve_together(incident, Policy(allow=Effect.CHANGES_OUTPUTS))
    return {patch.setting: (patch.new, patch.reason) for patch in patches}


def test_of_fewer_bits_the_most_that_fit_are_taken(subtests):
    for device_gib, taken in [(6, "8bit"), (4, "4bit"), (2, None)]:
        with subtests.test(device_gib=device_gib, taken=taken):
            assert chosen(device_gib)["quantization"][0] == taken


def test_where_none_fit_the_reason_is_that_of_the_fewest():
    assert "2.00 GiB" in chosen(2)["quantization"][1]
