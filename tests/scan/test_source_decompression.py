"""Compressed logs: the bytes inside them, in little memory, and what could be read of a damaged one."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import sys
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import InputError
from oomguard.core.installation import install_hint
from oomguard.scan.source import Unpacked, damage_of, format_of, open_log

PACK = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
TEXT = b"".join(b"INFO step %d of a run\n" % i for i in range(60_000))
every_format = pytest.mark.parametrize("suffix", list(PACK))


def unpack(data: bytes, name: str = "a.log", size: int = 1 << 16) -> tuple[bytes, str | None]:
    form = format_of(data[:10], name)
    assert form is not None
    with Unpacked(io.BytesIO(data), form, name) as stream:
        text = b"".join(iter(lambda: stream.read(size), b""))
        return text, stream.damage


@every_format
def test_the_bytes_inside_are_read(suffix):
    assert unpack(PACK[suffix](TEXT)) == (TEXT, None)


@every_format
def test_several_members_are_read_through(suffix):
    data = PACK[suffix](TEXT) + PACK[suffix](b"") + PACK[suffix](b"the last line\n")

    assert unpack(data) == (TEXT + b"the last line\n", None)


@every_format
def test_the_format_is_told_by_the_first_bytes_whatever_the_name(tmp_path, suffix):
    path = tmp_path / "engine.txt"
    path.write_bytes(PACK[suffix](TEXT))

    with open_log(str(path)) as stream:
        assert stream.read(22) == TEXT[:22]


@every_format
def test_plain_text_under_a_compressed_name_is_plain_text(tmp_path, suffix):
    path = tmp_path / f"engine.log{suffix}"
    path.write_bytes(TEXT)

    with open_log(str(path)) as stream:
        assert stream.read(len(TEXT)) == TEXT
        assert damage_of(stream) is None


@every_format
def test_a_truncated_file_gives_what_is_there_and_says_so(suffix):
    noisy = TEXT + bytes(range(256)) * 4
    text, damage = unpack(PACK[suffix](noisy)[:-6])

    assert noisy.startswith(text)
    assert f"{len(text)} unpacked bytes before that" in damage
    assert "ends early" in damage


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_a_truncated_large_file_gives_most_of_its_text(suffix):
    numbers = random.Random(1)
    data = b"".join(b"%f\n" % numbers.random() for _ in range(200_000))
    text, damage = unpack(PACK[suffix](data)[:-2000])

    assert data.startswith(text)
    assert len(text) > len(data) // 2
    assert damage


@every_format
def test_a_corrupt_file_is_damaged_and_not_an_exception(suffix):
    data = bytearray(PACK[suffix](TEXT))
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xa5" * 40
    text, damage = unpack(bytes(data))

    assert text != TEXT
    assert "is damaged" in damage or "ends early" in damage


@every_format
def test_a_wrong_checksum_is_damage(suffix):
    data = bytearray(PACK[suffix](TEXT))
    at = {".gz": -8, ".zst": -4, ".xz": -30, ".bz2": -4}[suffix]
    data[at] ^= 0xFF

    assert unpack(bytes(data))[1]


@every_format
def test_bytes_behind_the_end_are_told_and_padding_is_not(suffix):
    packed = PACK[suffix](TEXT)

    assert unpack(packed + b"\0" * 5000) == (TEXT, None)
    text, damage = unpack(packed + b"more text, not packed\n")
    assert text == TEXT
    assert "followed by bytes that are not" in damage


@every_format
@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_file_cut_before_it_can_be_told_is_damaged_by_its_name(tmp_path, suffix, length):
    path = tmp_path / f"engine.log{suffix}"
    path.write_bytes(PACK[suffix](TEXT)[:length])

    with open_log(str(path)) as stream:
        assert stream.read(1 << 20) == b""
        assert "ends early" in damage_of(stream)


@every_format
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_no_bytes_make_it_raise(suffix, data):
    packed = bytearray(PACK[suffix](TEXT[:2000]))
    for _ in range(data.draw(st.integers(1, 6))):
        packed[data.draw(st.integers(12, len(packed) - 1))] = data.draw(st.integers(0, 255))
    text, damage = unpack(bytes(packed), size=data.draw(st.integers(1, 4000)))

    assert (
        damage or text == TEXT[:2000] or suffix == ".zst"
    )  # a changed header may turn its checksum off


@every_format
@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5), read=st.integers(1, 9000))
def test_any_members_read_in_any_pieces_give_the_same_bytes(suffix, sizes, read):
    parts = [TEXT[:size] for size in sizes]

    assert unpack(b"".join(PACK[suffix](part) for part in parts), size=read) == (
        b"".join(parts),
        None,
    )


def bomb(suffix: str, size_bytes: int) -> bytes:
    """That many zeros, packed without ever being there as a whole."""
    zeros = b"\0" * (1 << 20)
    if suffix == ".zst":
        packer = zstandard.ZstdCompressor(level=3).compressobj()
    else:
        packer = {".xz": lambda: lzma.LZMACompressor(preset=0), ".bz2": bz2.BZ2Compressor}.get(
            suffix, lambda: None
        )()
    if packer is None:
        out = io.BytesIO()
        with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=9) as file:
            for _ in range(size_bytes >> 20):
                file.write(zeros)
        return out.getvalue()
    return b"".join(packer.compress(zeros) for _ in range(size_bytes >> 20)) + packer.flush()


@pytest.mark.parametrize(
    ("suffix", "size_bytes"), [(".gz", 256 << 20), (".zst", 1 << 30), (".xz", 128 << 20)]
)
def test_a_bomb_costs_time_and_not_memory(suffix, size_bytes):
    data = bomb(suffix, size_bytes)
    assert len(data) < size_bytes // 500
    form = format_of(data[:10])
    tracemalloc.start()
    try:
        with Unpacked(io.BytesIO(data), form, "bomb") as stream:
            read_bytes = sum(iter(lambda: len(stream.read(1 << 20)), 0))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert read_bytes == size_bytes
    assert peak_bytes < 80 << 20


def test_xz_dictionary_of_a_gigabyte_is_refused_as_damage():
    data = lzma.compress(b"x" * 1000, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])

    assert "Memory usage limit" in unpack(data)[1]


def test_skippable_frame_before_the_first_zstd_frame_is_skipped():
    assert unpack(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + PACK[".zst"](TEXT)) == (TEXT, None)


def test_without_the_zstd_package_the_error_names_it(monkeypatch, tmp_path):
    (tmp_path / "a.zst").write_bytes(PACK[".zst"](TEXT))
    monkeypatch.setitem(sys.modules, "zstandard", None)

    with pytest.raises(InputError, match="package that reads it is missing") as caught:
        open_log(str(tmp_path / "a.zst"))

    assert caught.value.hint == install_hint("zstd")


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("logs.zip", b"PK\x03\x04"),
        ("logs.7z", b"7z\xbc\xaf'\x1c"),
        ("a.lz4", b'\x04"M\x18'),
        ("a.Z", b"\x1f\x9d"),
    ],
)
def test_unread_archive_is_refused_with_the_unpack_command(name, begins):
    with pytest.raises(InputError, match="oomguard does not read") as caught:
        format_of(begins + b"123456", name)

    assert "| oomguard diagnose -" in caught.value.hint


@pytest.mark.parametrize(
    "head", [b"BZh is a word", b"", b"\x1f", b"PK\x03\x04 a checkpoint", b"plain text"]
)
def test_what_only_begins_like_an_archive_is_plain(head):
    assert format_of(head[:10], "a.log") is None
