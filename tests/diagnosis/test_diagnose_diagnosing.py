"""The door of a diagnosis in Python: what it takes, and what it says of anything else."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest

import oomguard
from oomguard.core.facts import GIB
from support.each import each

LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 1.00 GiB is free.\n"
)
# A wording that prints what is asked for and no total: the device's size is the caller's to give.
WITHOUT_TOTAL = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n"


@each("source", [5, 2.5, None, b"CUDA out of memory", ["error.log"], ValueError, object()])
def test_wrong_input_type_is_a_usage_error_with_the_right_ones(
    source,
):
    with pytest.raises(
        oomguard.UsageError, match="a log's text, the path of a log or an exception"
    ):
        oomguard.diagnose(source)


def test_a_huge_object_is_named_in_few_words():
    with pytest.raises(oomguard.UsageError) as caught:
        oomguard.diagnose(["x" * 1000] * 1000)

    assert len(str(caught.value)) < 200


def test_a_text_a_path_and_an_exception_give_the_same_figures(tmp_path):
    path = tmp_path / "error.log"
    path.write_text(LOG)
    sources = (LOG, path, str(path), RuntimeError(LOG.removeprefix("torch.OutOfMemoryError: ")))

    found = [oomguard.diagnose(source).incidents[0] for source in sources]

    assert {incident.number("device_free_bytes") for incident in found} == {GIB}
    assert {incident.kind for incident in found} == {"cuda_oom"}


def test_a_path_that_cannot_be_read_is_an_input_error():
    with pytest.raises(oomguard.InputError):
        oomguard.diagnose(Path("no/such/file.log"))


@each("size", ["24GiB", 24 * GIB])
def test_the_size_of_the_device_is_taken_as_a_size_or_as_bytes(size):
    incident = oomguard.diagnose(WITHOUT_TOTAL, gpu_memory=size).incidents[0]

    assert incident.number("device_total_bytes") == 24 * GIB


@each("size", [0, -1, "0GiB", "much", True])
def test_a_size_that_no_device_has_is_a_setting_error(size):
    with pytest.raises(oomguard.SettingError):
        oomguard.diagnose(WITHOUT_TOTAL, gpu_memory=size)


@each("value", [0.85, "0.85"])
def test_settings_in_force_are_plain_as_on_the_command_line(value):
    incident = oomguard.diagnose(
        WITHOUT_TOTAL, settings={"gpu-memory-utilization": value}
    ).incidents[0]

    assert incident.settings["gpu_memory_utilization"].value == 0.85
    assert incident.number("gpu_memory_utilization_ratio") == 0.85


@each("settings", [{"no_such": 1}, {"max_num_seqs": "many"}, {"max_num_seqs": True}])
def test_unknown_setting_or_value_is_a_setting_error(settings):
    with pytest.raises(oomguard.SettingError):
        oomguard.diagnose(WITHOUT_TOTAL, settings=settings)


def test_every_parameter_is_of_a_public_or_a_plain_type():
    public = {
        getattr(oomguard, name)
        for name in oomguard.__all__
        if inspect.isclass(getattr(oomguard, name))
    }
    plain = {str, int, float, bool, Path, BaseException, type(None)}

    def leaves(kind: object) -> set[object]:
        parts = [part for part in typing.get_args(kind) if part is not ...]
        return set().union(*map(leaves, parts)) if parts else {kind}

    hints = typing.get_type_hints(oomguard.diagnose)
    assert set().union(*map(leaves, hints.values())) <= public | plain


@each("text", ["erorr.log", "serve.log.1.gz", "runs/7/serve", "./run.out", r"C:\logs\run.err"])
def test_string_like_a_path_is_an_error_without_a_file(text):
    with pytest.raises(oomguard.InputError, match=r"(?i)no such file|does not exist"):
        oomguard.diagnose(text)


@each(
    "text", ["Killed", "RuntimeError: see /var/log/a.log", '{"error":"a/b.log"}', "a/b.log\nKilled"]
)
def test_a_text_that_names_a_path_is_still_a_text(text):
    assert oomguard.diagnose(text).verdict == "no_oom"


def test_each_cause_is_listed_once_and_no_fix_is_lost():
    log = (
        "INFO 12-01 08:00:00 llm_engine.py:249] Initializing an LLM engine (v0.6.4) with config: model='org/Talk-70B', "
        "dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, enforce_eager=False\n"
        "INFO 12-01 08:00:05 model_runner.py:1072] Starting to load model org/Talk-70B...\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which "
        "150.00 MiB is free. Including non-PyTorch memory, this process has 78.90 GiB memory in use. Of the allocated memory "
        "78.40 GiB is allocated by PyTorch, and 60.00 MiB is reserved by PyTorch but unallocated.\n"
    )

    (incident,) = oomguard.diagnose(log).incidents

    named = [cause.id for cause in incident.causes]
    assert named[0] == "weights_do_not_fit"
    assert len(set(named)) == len(named)
    assert {"tensor_parallel_size", "quantization"} <= {patch.setting for patch in incident.plan}
