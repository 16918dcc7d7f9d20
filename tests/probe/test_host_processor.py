"""What the processor can do is read from the kernel's own list, and is nothing where that is not there."""

from __future__ import annotations

import pytest

from oomguard.probe import host


@pytest.mark.parametrize(
    ("text", "has_tiles", "multiplies"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n",
            True,
            True,
        ),
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n", False, True),
        ("processor\t: 0\nflags\t\t: fpu avx512f\n", False, False),
        ("Features\t: fp asimd\n", False, False),
        (None, False, False),
    ],
    ids=["amx", "bfloat16", "without", "another kind", "no file"],
)
def test_what_it_can_do_is_what_the_kernel_lists(
    tmp_path, monkeypatch, text, has_tiles, multiplies
):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(host, "_CPUINFO", path)
    host._flags.cache_clear()
    try:
        assert host.has_matrix_tiles() is has_tiles
        assert host.multiplies_in_bfloat16() is multiplies
    finally:
        host._flags.cache_clear()
