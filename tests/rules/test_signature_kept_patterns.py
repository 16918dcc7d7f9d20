"""Compiled patterns are kept for the next start, and only what is whole and of this library is taken from there."""

from __future__ import annotations

import hashlib
import marshal

import pytest
import regex

from oomguard.rules import signature
from oomguard.rules.signature import PatternCache, trusted_pattern

TEXT = r"(?i)Tried to allocate (?P<tried>{size})(?=\. GPU)"
LOG = "CUDA out of memory. tried to  allocate 24.56 MiB. GPU 0 has"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(signature.atexit, "register", lambda call: call)
    return tmp_path / "oomguard"


def kept_once() -> PatternCache:
    first = PatternCache()
    first.compiled(TEXT)
    first._keep()
    return first


def test_a_kept_pattern_is_not_compiled_again_and_finds_the_same(monkeypatch):
    kept_once()
    monkeypatch.setattr(signature, "trusted_pattern", None)

    again = PatternCache().compiled(TEXT)

    assert again.search(LOG).capturesdict() == trusted_pattern(TEXT).search(LOG).capturesdict()


def test_what_two_programs_compiled_at_once_is_kept_of_both():
    one, other = PatternCache(), PatternCache()
    one.compiled("a"), other.compiled("b")
    one._keep(), other._keep()

    assert {"a", "b"} <= PatternCache()._kept.keys()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\0" * 100,
        hashlib.sha256(b"no data").digest() + b"no data",
        marshal.dumps({TEXT: b"1"}),
    ],
    ids=["empty", "cut", "zeros", "not of this form", "without its digest"],
)
def test_a_damaged_file_is_as_good_as_none(content):
    path = kept_once()._path
    path.write_bytes(content)

    assert PatternCache().compiled(TEXT).search(LOG)


def test_what_the_library_does_not_take_is_compiled_again():
    path = kept_once()._path
    content = marshal.dumps({TEXT: marshal.dumps(("x", "no flags"))})
    path.write_bytes(hashlib.sha256(content).digest() + content)

    assert PatternCache().compiled(TEXT).search(LOG)


def test_another_version_of_the_library_has_another_file(monkeypatch):
    path = PatternCache()._path
    monkeypatch.setattr(regex, "__version__", "2099.1.1")

    assert PatternCache()._path != path
