"""The allocator's options and variable, for the torch that printed the message."""

import pytest

from oomguard.diagnosis import diagnose


def _variable(text: str) -> str | None:
    (incident,) = diagnose(text).incidents
    return next(
        (patch.as_env for patch in incident.plan if patch.setting == "allocator_options"), None
    )


def _message(head: str, tip: str) -> str:
    return (
        f"torch.OutOfMemoryError: {head} out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 24.00 GiB of "
        "which 300.00 MiB is free. Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated "
        f"memory 17.30 GiB is allocated by PyTorch, and 5.50 GiB is reserved by PyTorch but unallocated.{tip}\n"
    )


OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 24.00 GiB total capacity; 17.30 GiB "
    "already allocated; 300.00 MiB free; 22.80 GiB reserved in total by PyTorch)\n"
)


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        (_message("CUDA", ""), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (
            _message(
                "CUDA",
                " If it is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid it.",
            ),
            "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ),
        (
            "torch==2.11.0\n"
            + _message(
                "CUDA", " Try: try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            ),
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        ("torch==2.10.0\n" + _message("CUDA", ""), "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (
            "torch==2.9.1\n" + _message("CUDA", ""),
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
        (_message("HIP", ""), "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"),
        (OLD, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
        ("torch==2.0.1\n" + _message("CUDA", ""), "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
    ],
)
def test_the_options_fit_the_torch_that_failed(text, variable):
    assert _variable(text) == variable
