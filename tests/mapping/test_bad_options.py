"""An option that is none is named before anything is computed, and no store is made."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

import oomguard


def test_a_name_that_no_file_can_have_is_a_store_error(subtests, tmp_path, upper):
    for name, told in [
        ("a\0b.sqlite", "contains a null byte"),
        ("n" * 300, "is too long"),
        ("n" * 250, "is too long"),
    ]:
        with subtests.test(name=name, told=told):
            with pytest.raises(oomguard.StoreError, match=told) as caught:
                oomguard.map(upper, ["a"], store=str(tmp_path / name), identity={})
            assert "results.sqlite" in caught.value.hint
            assert (list(tmp_path.iterdir()), upper.batches) == ([], [])


def test_a_store_is_a_file_and_no_database_in_memory(subtests, tmp_path, upper, monkeypatch):
    for name in [":memory:", "file:x?mode=memory", "file:x.sqlite"]:
        with subtests.test(name=name):
            monkeypatch.chdir(tmp_path)
            with pytest.raises(oomguard.StoreError, match=re.escape(f"got {name!r} of SQLite")):
                oomguard.map(upper, ["a"], store=name, identity={})
            assert not Path(name).exists()
            oomguard.map(upper, ["a"], store=f"./{name}", identity={})
            assert Path(name).exists()


def test_unusable_serializer_is_named_before_fn_runs(subtests, store, upper):
    for name in ["encode", "decode"]:
        with subtests.test(name=name):
            with pytest.raises(oomguard.UsageError, match=f"{name} is a int") as caught:
                oomguard.map(upper, ["a"], store=store, identity={}, **{name: 3})
            assert f"{name}=FUNCTION" in caught.value.hint
            assert (upper.batches, store.exists()) == ([], False)


def test_a_function_that_is_none_is_named(subtests, store):
    for fn, told in [(None, "got None"), ("upper", "got a str")]:
        with subtests.test(fn=fn, told=told):
            for call in (oomguard.map, oomguard.imap):
                with pytest.raises(oomguard.UsageError, match=told) as caught:
                    call(fn, ["a"], store=store)
                assert "takes a list of items" in caught.value.hint


def test_a_name_in_identity_is_a_text(subtests, store, upper):
    for name in [1, None, (1,)]:
        with subtests.test(name=name):
            with pytest.raises(oomguard.UsageError, match=r"keys must be texts") as caught:
                oomguard.map(upper, ["a"], store=store, identity={name: 2, "seed": 0})
            assert repr(name) in str(caught.value)
            assert "identity={" in caught.value.hint


def test_results_say_how_to_copy_them_and_their_number(store, upper):
    results = oomguard.map(upper, ["a", "b"], store=store, identity={})
    for keep in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"list\(results\)"):
            keep(results)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"result {index} does not exist: there are 2"):
            results[index]


def test_progress_that_is_neither_true_nor_false_is_named(subtests, store, upper):
    for progress in ["yes", "no", None, 1]:
        with subtests.test(progress=progress):
            with pytest.raises(oomguard.SettingError, match=re.escape(f"progress={progress!r}")):
                oomguard.map(upper, ["a"], store=store, identity={}, progress=progress)
            assert (upper.batches, store.exists()) == ([], False)
