"""Variables that decide over memory: torch's own spelling is the law, and every mistake comes with a way out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.probe.checks import allocator_checks, visible_devices_checks

CUDA, PLAIN, HIP = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"


def one(environ, torch="2.13.0", **more):
    (check,) = allocator_checks(environ, torch, **more)
    return check


def visible(value, count=2):
    (check,) = visible_devices_checks({"CUDA_VISIBLE_DEVICES": value}, count)
    return check


def test_nothing_set_is_one_line():
    assert [(c.status, c.text) for c in allocator_checks({}, None)] == [
        ("ok", "allocator variables: none set")
    ]


def test_options_that_torch_takes_are_shown_as_they_are_set():
    value = "expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4],backend:native"
    check = one({PLAIN: value})

    assert (check.status, check.text, check.advice) == ("ok", f"{PLAIN}={value}", "")


@pytest.mark.parametrize(
    ("value", "mistake"),
    [
        (
            "expandable_segmants:True",
            "unknown option 'expandable_segmants', did you mean 'expandable_segments'?",
        ),
        (
            "expandable_segments:true",
            "expandable_segments must be True or False, not 'true'",
        ),
        ("expandable_segments=True", "'expandable_segments=True' is not option:value"),
        (
            "max_split_size_mb:5",
            "max_split_size_mb must be a whole number of at least 20, not '5'",
        ),
        (
            "max_split_size_mb:1.5",
            "max_split_size_mb must be a whole number of at least 20, not '1.5'",
        ),
        (
            "garbage_collection_threshold:80",
            "garbage_collection_threshold must be between 0 and 1, not '80'",
        ),
        ("backend:native,max_split_size_mb:", "'max_split_size_mb:' is not option:value"),
    ],
)
@pytest.mark.parametrize("name", [CUDA, PLAIN])
def test_what_torch_refuses_is_a_problem_with_the_way_out(name, value, mistake):
    check = one({name: value})

    assert (check.status, check.text, check.advice) == (
        "problem",
        f"{name}={value}: {mistake}",
        f"unset {name}",
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "expandable_segments:true",
        "expandable_segments=True",
        "max_split_size_mb:5",
        "max_split_size_mb:20",
        "garbage_collection_threshold:80",
        "garbage_collection_threshold:0.5",
        "",
        "roundup_power2_divisions:[256:1,512:2]",
        " expandable_segments : True ",
    ],
)
def test_the_installed_torch_is_of_the_same_opinion(value):
    torch = pytest.importorskip("torch")
    try:
        torch._C._accelerator_setAllocatorSettings(value)
        taken = True
    except (ValueError, RuntimeError):
        taken = False
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")

    assert (one({PLAIN: value}).status == "ok") is taken


def test_the_plain_name_is_a_problem_before_torch_2_10():
    check = one({PLAIN: "expandable_segments:True"}, torch="2.9.1+cu128")

    assert check.status == "problem"
    assert "torch 2.9.1+cu128 ignores this name" in check.text
    assert check.advice == f'export {CUDA}="${PLAIN}"; unset {PLAIN}'


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0"])
def test_plain_name_is_used_from_torch_2_10_and_old_one_read(version):
    assert one({PLAIN: "backend:native"}, torch=version).status == "ok"
    old = one({CUDA: "backend:native"}, torch=version)
    assert old.status == "ok"
    assert "the older name" in old.text
    assert old.advice == f'export {PLAIN}="${CUDA}"; unset {CUDA}'


def test_the_old_name_alone_is_right_before_torch_2_10():
    check = one({CUDA: "backend:native"}, torch="2.8.0")

    assert (check.status, check.advice) == ("ok", "")


def test_an_unknown_torch_is_said_and_not_guessed():
    assert "torch's version is unknown" in one({PLAIN: "backend:native"}, torch=None).text


def test_two_names_that_disagree_are_a_problem():
    checks = allocator_checks({PLAIN: "backend:native", CUDA: "backend:cudaMallocAsync"}, "2.13.0")

    assert [c.status for c in checks] == ["problem", "ok"]
    assert checks[0].advice == f"unset {CUDA}"


def test_expandable_segments_under_wsl_are_a_problem():
    assert one({PLAIN: "expandable_segments:True"}, wsl=True).status == "problem"
    assert one({PLAIN: "expandable_segments:False"}, wsl=True).status == "ok"


def test_the_name_for_amd_beside_an_nvidia_torch_is_said():
    assert "does not read it" in one({HIP: "backend:native"}, torch="2.8.0+cu126").text
    assert "does not read it" not in one({HIP: "backend:native"}, torch="2.8.0+rocm6.3").text


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.8", "ok"),
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "high", "problem"),
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "-1", "problem"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5", "ok"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "50%", "problem"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0", "problem"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", "ok"),
    ],
)
def test_the_variables_of_other_frameworks_are_read(name, value, status):
    assert one({name: value}).status == status


def test_a_watermark_of_zero_says_that_there_is_no_limit():
    check = one({"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0"})

    assert "removes the limit" in check.text
    assert check.advice == "unset PYTORCH_MPS_HIGH_WATERMARK_RATIO"


@given(value=st.text(max_size=40), torch=st.none() | st.text(max_size=10))
def test_no_value_raises(value, torch):
    for name in (CUDA, PLAIN, "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert one({name: value}, torch=torch).text.startswith(name)
    assert visible(value).status in {"ok", "problem"}


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        ("0", "ok", "1 visible"),
        ("1,0", "ok", "2 visible"),
        ("GPU-8932f937,MIG-3a", "ok", "2 visible"),
        ("", "problem", "hides all 2 devices"),
        ("-1", "problem", "hides all 2 devices"),
        ("2", "problem", "this machine has 2 devices"),
        ("0,0", "problem", "twice"),
        ("0,-1,1", "problem", "negative"),
        ("cuda:0", "problem", "must contain numbers"),
    ],
)
def test_visible_devices_are_checked_against_existing_ones(value, status, words):
    check = visible(value)

    assert check.status == status
    assert words in check.text
    assert (check.advice == "unset CUDA_VISIBLE_DEVICES") is (status == "problem")


def test_where_nvml_does_not_answer_no_number_is_called_wrong():
    assert visible("7", count=None).status == "ok"
    assert visible("", count=None).status == "ok"


def test_not_set_means_that_every_device_is_visible():
    (check,) = visible_devices_checks({}, 4)

    assert (check.status, check.text) == (
        "ok",
        "CUDA_VISIBLE_DEVICES is not set: every device is visible",
    )
