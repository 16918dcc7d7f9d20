"""What is wrong with a store, an item or an option is named, and what was finished is kept."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import UserDict
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import oomguard
from oomguard.mapping.store import Claims, ResultStore, network_file_system

ROOT = Path(__file__).parents[2]


def same(items):
    return list(items)


@pytest.fixture
def made(store):
    oomguard.map(same, [f"text {number}" * 50 for number in range(300)], store=store)
    return store


def changed(path, command):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(command)


def test_a_file_that_is_no_database_is_left_as_it_is(store):
    store.write_text("my notes\n" * 1000)
    with pytest.raises(oomguard.StoreError, match=r"it is not a store of oomguard\.map"):
        oomguard.map(same, [1], store=store)
    assert store.read_text() == "my notes\n" * 1000


def test_another_programs_database_is_left_as_it_is(store):
    changed(store, "CREATE TABLE mine (id)")
    before = store.read_bytes()
    with pytest.raises(oomguard.StoreError, match="the database of another program"):
        oomguard.map(same, [1], store=store)
    assert store.read_bytes() == before


def test_a_newer_store_says_which_versions(made):
    changed(made, "PRAGMA user_version = 7")
    with pytest.raises(
        oomguard.StoreError,
        match=r"a newer oomguard wrote it \(schema 7, this version supports 1\)",
    ):
        oomguard.map(same, [1], store=made)


def test_damaged_store_error_says_how_to_save_readable_rows(made):
    with made.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (made.stat().st_size - 4096))
    with pytest.raises(oomguard.StoreError, match="it is damaged") as caught:
        list(oomguard.map(same, [f"text {number}" * 50 for number in range(300)], store=made))
    assert f"python -m oomguard.mapping.recover {made} saved.sqlite" in caught.value.hint


def test_damaged_result_is_named_and_recomputed_after_deletion(made):
    changed(made, "UPDATE value SET content = 'other' WHERE id = 5")
    texts = [f"text {number}" * 50 for number in range(300)]
    results = oomguard.map(same, texts, store=made)
    assert results[3] == texts[3]
    with pytest.raises(oomguard.StoreError, match="result 5 is damaged") as caught:
        results[4]
    changed(made, re.search("'(.*)'", caught.value.hint)[1])
    again = oomguard.map(same, texts, store=made)
    assert (again.computed, again[4]) == (1, texts[4])


def test_a_deleted_last_result_gives_its_place_to_another_item(made):
    changed(made, "DELETE FROM result WHERE id = 300")
    results = oomguard.map(same, ["another text"], store=made)
    assert (results.computed, list(results)) == (1, ["another text"])


def test_a_result_that_was_stored_without_a_claim_stays(store):
    with closing(Claims(store)) as claims, closing(ResultStore(store, claims)) as database:
        key = b"sixteen bytes ..", 0
        first = database.put(1, [(key, "json", b"1")])
        rows = database.put(1, [((key[0], 1), "json", b"2"), (key, "json", b"3")])
        assert rows[1] == first[0]
        assert [database.values(rows)[row][1] for row in rows] == [b"2", b"1"]


def test_a_full_disk_ends_the_call_and_the_next_one_goes_on(store):
    body = f"""
import resource, oomguard
def fn(items):
    return [str(item) * 20_000 for item in items]
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
try:
    oomguard.map(fn, range(1000, 1200), store={str(store)!r}, batch_size=5, identity={{}})
except oomguard.StoreError as error:
    print(error, error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
results = oomguard.map(fn, range(1000, 1200), store={str(store)!r}, batch_size=5, identity={{}})
print(results, list(results) == fn(range(1000, 1200)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    told, results = ran.stdout.splitlines()
    assert "results.sqlite: " in told
    assert "finished items are kept" in told
    computed, reused = map(
        int, re.search(r"(\d+) computed, (\d+) reused, 0 failed> True", results).groups()
    )
    assert computed + reused == 200
    assert reused > 5


def test_store_on_a_network_folder_uses_no_shared_memory(store, tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        f"23 22 0:50 / {tmp_path} rw,relatime shared:5 - nfs4 server:/export rw,vers=4.2\n"
    )
    monkeypatch.setattr("oomguard.mapping.store.MOUNTS", mounts)
    oomguard.map(same, range(5), store=store)
    assert "The store is on a network folder: file_system=nfs4" in caplog.text
    with closing(sqlite3.connect(store)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_local_folder_is_none_of_a_network(tmp_path):
    assert network_file_system(tmp_path) is None


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(oomguard.StoreError, match=r"the folder .*/no does not exist") as caught:
        oomguard.map(same, [1], store=tmp_path / "no" / "s.sqlite")
    assert caught.value.hint == f"mkdir -p {tmp_path / 'no'}"


def test_a_store_that_is_no_path_is_named(subtests):
    for given in [None, 5, b"s.sqlite", ""]:
        with subtests.test(store=given):
            with pytest.raises(
                oomguard.UsageError, match=re.escape(f"store must be a path, got {given!r}")
            ) as caught:
                oomguard.map(same, [1], store=given)
            assert 'store="results.sqlite"' in caught.value.hint


def test_a_path_that_is_refused_has_nothing_new_beside_it(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("my notes\n" * 1000)
    changed(tmp_path / "other.sqlite", "CREATE TABLE mine (id)")
    (tmp_path / "dangling").symlink_to("no/where")
    before = sorted(path.name for path in tmp_path.iterdir())
    for name in before:
        with pytest.raises(oomguard.StoreError):
            oomguard.map(same, [1], store=tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_key_that_is_no_function_is_told_with_one(store):
    with pytest.raises(oomguard.UsageError, match="key must be a function, got a str") as caught:
        oomguard.map(same, [{"id": 1}], store=store, key="id")
    assert "key=lambda item: item['id']" in caught.value.hint


def test_what_key_raises_names_the_item(store):
    with pytest.raises(KeyError) as caught:
        oomguard.map(same, [{"id": 1}, {}], store=store, key=lambda item: item["id"])
    assert "key= raised this for items[1]" in caught.value.__notes__[0]


def test_key_of_an_odd_type_is_named_by_its_position(subtests, store):
    def check(key, shown):
        with pytest.raises(oomguard.UsageError, match=rf"the key of items\[1\] is {shown}"):
            oomguard.map(
                same, ["a", "b"], store=store, key=lambda item: "a" if item == "a" else key
            )

    for key, shown in [
        (None, "None"),
        ([1], "a list"),
        ({"id": 1}, "a dict"),
        (float("nan"), "NaN"),
    ]:
        with subtests.test(key=key, shown=shown):
            check(key, shown)


class Table:
    iloc = None

    def __len__(self):
        return 2

    def __getitem__(self, label):
        return f"column {label}"


def test_result_without_one_entry_per_item_explains_the_rule(subtests, store):
    def check(returned):
        with pytest.raises(
            oomguard.UsageError, match=f"fn returned a {type(returned).__name__}"
        ) as caught:
            oomguard.map(lambda _: returned, ["a", "b"], store=store, identity={})
        assert "a list with one result for each item" in caught.value.hint

    for returned in [
        UserDict({0: "ids", 1: "mask"}),
        {0: 1, 1: 2},
        Table(),
        torch.tensor(1.0),
        np.array(1.0),
        {1, 2},
        map(str, "ab"),
    ]:
        with subtests.test(returned=returned):
            check(returned)


def test_item_without_content_is_named_before_computing(store, upper):
    with pytest.raises(oomguard.UsageError, match=r"items\[2\] is or contains a object") as caught:
        oomguard.map(upper, ["a", "b", {"image": object()}], store=store, identity={})
    assert "key=" in caught.value.hint
    assert upper.batches == []


def test_an_item_that_holds_itself_is_named(store):
    item = []
    item.append(item)
    with pytest.raises(oomguard.UsageError, match=r"items\[0\].*list"):
        oomguard.map(same, [item], store=store)


def test_two_items_of_one_key_are_named_before_computing(subtests, store, upper):
    def check(kind):
        papers = kind([{"id": 1}, {"id": 2}, {"id": 1}])
        with pytest.raises(
            oomguard.UsageError, match=r"items\[2\] has the same key as .*: 1"
        ) as caught:
            oomguard.map(upper, papers, store=store, key=lambda paper: paper["id"], identity={})
        assert ("items[0]" in str(caught.value)) == (kind is list)
        assert upper.batches == []

    for name, kind in [
        ("list", list),
        ("generator", iter),
    ]:
        with subtests.test(name):
            check(kind)


def test_what_is_no_list_of_items_is_named(subtests, store):
    for name, items in [
        ("text", "a text"),
        ("bytes", b"bytes"),
        ("dict", {"a": 1}),
        ("number", 5),
    ]:
        with (
            subtests.test(name),
            pytest.raises(oomguard.UsageError, match=f"items must not be a {type(items).__name__}"),
        ):
            oomguard.map(same, items, store=store)


def test_an_option_that_is_none_is_named_and_no_store_is_made(subtests, store):
    for options in [
        {"batch_size": 0},
        {"batch_size": "8"},
        {"on_error": "ignore"},
        {"clear_cache_every": 0},
        {"allow": "all"},
    ]:
        with subtests.test(options=options):
            with pytest.raises(oomguard.SettingError):
                oomguard.map(same, [1], store=store, **options)
            assert not store.exists()


def test_unstorable_result_is_named_and_finished_ones_stay(store):
    def fn(items):
        return [object() if item == 9 else item for item in items]

    with pytest.raises(oomguard.UsageError, match=r"the result of items\[9\] cannot be stored"):
        oomguard.map(fn, range(12), store=store, batch_size=4)
    assert oomguard.map(fn, range(8), store=store).reused == 8


def test_a_store_that_was_copied_goes_on_where_it_was(made, tmp_path):
    shutil.copy(made, tmp_path / "copy.sqlite")
    texts = [f"text {number}" * 50 for number in range(300)]
    assert oomguard.map(same, texts, store=tmp_path / "copy.sqlite").reused == 300
