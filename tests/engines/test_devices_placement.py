"""What an engine reads in CUDA_VISIBLE_DEVICES, by version, and how it tells that it has started."""

from __future__ import annotations

from oomguard.engines.devices import started_words, visible_devices


def test_a_uuid_is_given_to_the_versions_that_read_one(subtests):
    for version, uuid in [
        ("0.8.5", False),
        ("0.20.1", False),
        ("0.23.0", False),
        ("0.24.0", True),
        ("0.24.0rc1+cu130", True),
        ("0.32.0", True),
        (None, False),
        ("no version", False),
    ]:
        with subtests.test(version=version, uuid=uuid):
            assert visible_devices("vllm", version).uuid is uuid


def test_an_instance_is_given_where_the_engine_starts_on_it(subtests):
    for version, number, gpus, takes in [
        ("0.23.0", 0, 8, False),
        ("0.32.0", 0, 1, True),
        ("0.32.0", 2, 1, False),
        ("0.32.0", 2, 8, True),
    ]:
        with subtests.test(version=version, number=number, gpus=gpus, takes=takes):
            assert visible_devices("vllm", version).takes_instance(number, gpus) is takes


def test_an_engine_without_a_file_is_given_what_everything_reads():
    assert (visible_devices("sglang", "0.5.4").uuid, started_words("sglang")) == (False, None)
