"""What the engine did when memory ran out, where its figures tell it and its lines do not."""

from __future__ import annotations

from oomguard.core.facts import GIB, Fact, FactValue
from oomguard.estimate.printed_budget import with_static_share


def facts(framework: str = "sglang", **values: FactValue) -> dict[str, Fact]:
    return {name: Fact(name, value) for name, value in {"framework": framework, **values}.items()}


BUILT = {
    "estimated_weights_bytes": 100 * GIB,
    "device_total_bytes": 80 * GIB,
    "own_ratio": 0.98,
    "unused_ratio": 0.0,
}


def test_model_larger_than_its_full_device_is_being_built():
    known = facts(**BUILT)

    assert with_static_share(known, "unknown") == "load_weights"
    assert known["before_kv_cache"].value is True


def test_nothing_tells_that_a_model_is_built_otherwise(subtests):
    for name, more in [
        ("the weights fit", {"estimated_weights_bytes": 60 * GIB}),
        ("others fill it", {"own_ratio": 0.5}),
        ("torch holds pieces", {"unused_ratio": 0.05}),
        ("the pool stands", {"pool_free_bytes": GIB}),
    ]:
        with subtests.test(name):
            assert with_static_share(facts(**{**BUILT, **more}), "unknown") == "unknown"


def test_what_lines_and_frames_tell_of_the_phase_stays():
    assert with_static_share(facts(**BUILT), "prefill") == "prefill"
    assert with_static_share(facts("vllm", **BUILT), "unknown") == "unknown"


def test_weights_beside_a_pool_are_those_of_a_draft_or_an_update():
    known = facts(pool_free_bytes=4 * GIB)

    assert with_static_share(known, "load_weights") == "load_weights"
    assert known["pool_stands"].value is True
    assert "before_kv_cache" not in known


def test_request_table_is_known_by_its_bytes():
    known = facts(tried_bytes=4 * 2049 * (80 * 131072 + 4))
    with_static_share(known, "unknown")

    assert known["buffer"].value == "request table"
    assert known["max_model_len_tokens"].value == 80 * 131072


def test_other_bytes_are_no_table_of_requests(subtests):
    for name, more in [
        ("no context has such bytes", {"tried_bytes": 5 * GIB + 12345678}),
        ("eight requests", {"tried_bytes": 30 * GIB, "max_num_seqs": 8}),
        ("a round size", {"tried_bytes": 16 * GIB}),
    ]:
        with subtests.test(name):
            known = facts(**more)
            with_static_share(known, "unknown")

            assert "buffer" not in known
