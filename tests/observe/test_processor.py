"""What the processor can do is read from the kernel's own list, and is nothing where that is not there."""

from __future__ import annotations

import pytest

from oomguard.observe import processor


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512f\n", False),
        ("Features\t: fp asimd\n", False),
        (None, False),
    ],
    ids=["amx", "without", "another kind", "no file"],
)
def test_tiles_are_those_that_the_kernel_lists(tmp_path, monkeypatch, text, has):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(processor, "_CPUINFO", path)
    processor.has_matrix_tiles.cache_clear()
    try:
        assert processor.has_matrix_tiles() is has
    finally:
        processor.has_matrix_tiles.cache_clear()
