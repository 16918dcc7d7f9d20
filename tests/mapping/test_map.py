"""What ``map`` promises: every item once, in order, kept whatever ends the program in between."""

from __future__ import annotations

import functools
import io
import json
import logging
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomguard
from oomguard.mapping.store import ResultStore

ALL = {"identity": {"model": "upper"}}


def double(numbers):
    return [2 * number for number in numbers]


def test_results_come_in_the_order_of_the_items(store):
    assert list(oomguard.map(double, range(100), store=store)) == [
        2 * number for number in range(100)
    ]


def test_second_call_computes_nothing_and_returns_the_same(store, upper):
    texts = [f"paper {number}" for number in range(50)]
    first = oomguard.map(upper, texts, store=store, **ALL)
    upper.batches.clear()
    second = oomguard.map(upper, texts, store=store, **ALL)
    assert upper.batches == []
    assert list(second) == list(first)
    assert (first.computed, first.reused, second.computed, second.reused) == (50, 0, 0, 50)


def test_more_items_in_another_order_compute_the_new_ones_only(store, upper):
    oomguard.map(upper, ["a", "b", "c"], store=store, **ALL)
    upper.batches.clear()
    assert list(oomguard.map(upper, ["d", "c", "a", "e", "b"], store=store, **ALL)) == [
        "D",
        "C",
        "A",
        "E",
        "B",
    ]
    assert upper.computed == ["d", "e"]


def test_equal_items_have_a_result_each(store, upper):
    drawn = iter(range(1000))
    results = oomguard.map(
        lambda prompts: [next(drawn) for _ in prompts], ["50-50"] * 200, store=store, **ALL
    )
    assert sorted(results) == list(range(200))
    assert list(oomguard.map(upper, ["50-50"] * 3, store=store, **ALL)) == ["50-50"] * 3


def test_only_missing_equal_items_are_computed(store, upper):
    oomguard.map(upper, ["same"] * 5, store=store, **ALL)
    upper.batches.clear()
    assert len(oomguard.map(upper, ["same"] * 7, store=store, **ALL)) == 7
    assert upper.computed == ["same"] * 2


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from("abcdef"), max_size=12), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_each_occurrence_of_an_item_is_computed_once(tmp_path_factory, calls, batch_size):
    store, computed = tmp_path_factory.mktemp("s") / "s.sqlite", []

    def fn(items):
        computed.extend(items)
        return [item * 2 for item in items]

    for items in calls:
        results = oomguard.map(fn, items, store=store, batch_size=batch_size, identity={})
        assert list(results) == [item * 2 for item in items]
    for item in "abcdef":
        assert computed.count(item) == max(items.count(item) for items in calls)


def test_generator_of_unknown_length_is_read_as_needed(store, upper):
    read = []

    def texts():
        for number in range(3000):
            read.append(number)
            yield f"text {number}"

    first = next(iter(oomguard.imap(upper, texts(), store=store, batch_size=4, **ALL)))
    assert first == "TEXT 0"
    assert len(read) == 4
    assert len(oomguard.map(upper, texts(), store=store, **ALL)) == 3000
    assert len(upper.computed) == 3000


def test_finished_items_of_a_generator_come_before_more_is_read(store, upper):
    texts = [f"text {number}" for number in range(20)]
    oomguard.map(upper, texts[:12], store=store, **ALL)
    read = []
    results = oomguard.imap(
        upper, (read.append(text) or text for text in texts), store=store, batch_size=4, **ALL
    )
    assert [next(results), len(read)] == ["TEXT 0", 4]
    assert list(results) == [text.upper() for text in texts[1:]]
    assert len(upper.computed) == 20


def test_what_a_generator_gave_before_it_failed_is_stored(store, upper):
    def texts(last):
        for number in range(50):
            if number == last:
                raise OSError("disk gone")
            yield f"text {number}"

    with pytest.raises(OSError, match="disk gone") as caught:
        oomguard.map(upper, texts(30), store=store, batch_size=4, **ALL)
    assert "30 items that this call finished are kept" in "".join(caught.value.__notes__)
    results = oomguard.map(upper, texts(None), store=store, batch_size=4, **ALL)
    assert (results.reused, results.computed) == (30, 20)


def test_a_watch_shows_the_function_by_its_name(store):
    with oomguard.watch() as seen:
        oomguard.map(functools.partial(double), range(8), store=store)
    assert [row.what for row in seen.rows] == ["double"]


def test_a_data_set_without_iteration_is_read_by_its_places(store, upper):
    class Texts:
        def __len__(self):
            return 3

        def __getitem__(self, place):
            return f"text {place}"  # torch's own never say where they end

    assert list(oomguard.map(upper, Texts(), store=store, **ALL)) == ["TEXT 0", "TEXT 1", "TEXT 2"]


def test_results_come_from_the_same_store_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = oomguard.map(double, range(5), store="results.sqlite")
    monkeypatch.chdir("/")
    assert list(results) == [0, 2, 4, 6, 8]


def test_no_items_give_no_results(subtests, store):
    for empty in [[], (), iter([]), {}.values()]:
        with subtests.test(empty=empty):
            results = oomguard.map(double, empty, store=store.with_name(type(empty).__name__))
            assert (len(results), list(results), results.failed) == (0, [], ())


def test_batches_grow_while_they_fit_up_to_the_limit(store, upper):
    oomguard.map(upper, [str(number) for number in range(100)], store=store, **ALL)
    assert [len(batch) for batch in upper.batches] == [8, 16, 32, 44]
    upper.batches.clear()
    oomguard.map(
        upper, [str(number) for number in range(100, 130)], store=store, batch_size=12, **ALL
    )
    assert [len(batch) for batch in upper.batches] == [12, 12, 6]


def test_results_are_a_sequence_with_slices_and_negative_indices(store):
    results = oomguard.map(double, range(10), store=store)
    assert (results[3], results[-1], results[7:], results[::-4]) == (
        6,
        18,
        [14, 16, 18],
        [18, 10, 2],
    )
    assert len(results) == 10
    with pytest.raises(IndexError):
        results[10]


def test_imap_gives_each_result_as_soon_as_it_is_finished(store, upper):
    results = oomguard.imap(upper, ["a", "b", "c", "d", "e"], store=store, batch_size=2, **ALL)
    assert [len(upper.computed) for _ in results] == [2, 2, 4, 4, 5]


def test_an_iteration_that_is_left_keeps_what_is_finished(store, upper):
    for _ in oomguard.imap(upper, ["a", "b", "c", "d"], store=store, batch_size=2, **ALL):
        break
    upper.batches.clear()
    assert list(oomguard.map(upper, ["a", "b", "c", "d"], store=store, **ALL)) == [
        "A",
        "B",
        "C",
        "D",
    ]
    assert upper.computed == ["c", "d"]


def test_ctrl_c_stops_at_once_and_keeps_what_is_finished(store):
    def fn(items):
        if 5 in items:
            raise KeyboardInterrupt
        return items

    with pytest.raises(KeyboardInterrupt) as caught:
        oomguard.map(fn, range(10), store=store, batch_size=2, **ALL)
    assert "4 items that this call finished are kept" in caught.value.__notes__[0]
    assert oomguard.map(fn, range(4), store=store, **ALL).reused == 4


def test_results_of_another_identity_are_counted_never_used(store, upper, caplog):
    oomguard.map(upper, ["a", "b"], store=store, identity={"model": "one", "seed": 0})
    with caplog.at_level(logging.WARNING, "oomguard"):
        results = oomguard.map(upper, ["a", "b"], store=store, identity={"model": "two", "seed": 0})
    assert upper.computed == ["a", "b", "a", "b"]
    assert results.other_results == 2
    assert 'others=2 differs="model one -> two"' in caplog.text


def test_the_values_in_which_identities_differ_are_both_named(subtests, tmp_path, upper, caplog):
    cases = [
        ({"t": 1}, {"t": 1.0}, "t 1 -> 1.0"),
        ({"t": 1}, {"t": "1"}, "t 1 -> '1'"),
        ({"t": None}, {}, "t None -> (not given)"),
        ({"t": [1, 2]}, {"t": [1, 3]}, "t [1, 2] -> [1, 3]"),
    ]
    for number, (first, second, told) in enumerate(cases):
        with subtests.test(first=first, second=second, told=told):
            store = tmp_path / f"{number}.sqlite"
            upper.batches.clear()
            oomguard.map(upper, ["a"], store=store, identity=first)
            oomguard.map(upper, ["a"], store=store, identity=second)
            assert f'others=1 differs="{told}"' in caplog.text
            assert upper.computed == ["a", "a"]


def test_what_partial_binds_counts_beside_the_identity(store):
    def scaled(numbers, factor):
        return [factor * number for number in numbers]

    for _ in range(2):
        for factor in (2, 3):
            bound = functools.partial(scaled, factor=factor)
            assert list(oomguard.map(bound, [1, 2], store=store, identity={"model": "m"})) == [
                factor,
                2 * factor,
            ]


def test_key_says_what_identifies_an_item(store):
    papers = [{"id": number, "read_at": object()} for number in range(3)]
    again = [{"id": number, "read_at": object()} for number in range(3)]

    def ids(batch):
        return [paper["id"] for paper in batch]

    oomguard.map(ids, papers, store=store, key=lambda paper: paper["id"], **ALL)
    results = oomguard.map(ids, again, store=store, key=lambda paper: paper["id"], **ALL)
    assert (list(results), results.reused) == ([0, 1, 2], 3)


def test_clear_cache_every_collects_after_so_many_items(store, monkeypatch):
    released = []
    monkeypatch.setattr("oomguard.probe.torch_memory.release", lambda: released.append(1))
    oomguard.map(double, range(40), store=store, batch_size=4, clear_cache_every=10)
    assert len(released) == 3  # after 12, 24, 36


def test_resuming_thousands_of_items_reads_no_results(store, monkeypatch):
    def long(numbers):
        return [str(number) * 2_000 for number in numbers]

    oomguard.map(long, range(10_000, 15_000), store=store, batch_size=500)
    looked_up = []
    find = ResultStore.find
    monkeypatch.setattr(
        ResultStore,
        "find",
        lambda own, number, keys: looked_up.extend(keys) or find(own, number, keys),
    )
    tracemalloc.start()
    try:
        results = oomguard.map(long, range(10_000, 15_000), store=store)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert results.reused == 5_000
    assert looked_up == []
    assert peak_bytes < 5_000 * 400, "the results are 50 MB"


def test_thousands_of_finished_items_are_found_in_any_order(store, upper):
    texts = [str(number) for number in range(3_000)]
    oomguard.map(upper, texts, store=store, batch_size=500, **ALL)
    assert oomguard.map(upper, texts[::-1], store=store, **ALL).reused == 3_000
    assert oomguard.map(upper, [*texts[1000::7], "new"], store=store, **ALL).computed == 1


def test_a_bar_is_on_a_terminal_only(store, upper, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = {}
    for kind, progress in ((Terminal, True), (Terminal, False), (io.StringIO, True)):
        monkeypatch.setattr(sys, "stderr", kind())
        oomguard.map(upper, ["a", "b"], store=store, progress=progress, **ALL)
        shown[kind, progress] = sys.stderr.getvalue()
    assert "2/2" in shown.pop((Terminal, True))
    assert set(shown.values()) == {""}


def test_store_is_one_file_and_an_empty_lock_file_at_the_end(store):
    oomguard.map(double, range(10), store=store)
    assert {
        path.name: path.stat().st_size > 0 for path in store.parent.iterdir() if path.is_file()
    } == {
        "results.sqlite": True,
        "results.sqlite.lock": False,
    }


def test_identities_can_be_read_in_the_store(store):
    import sqlite3

    oomguard.map(double, [1], store=store, identity={"model": "org/name", "seed": 7})
    database = sqlite3.connect(store)
    described = json.loads(database.execute("SELECT described FROM computation").fetchone()[0])
    database.close()
    assert described == {
        "function": "tests.mapping.test_map.double",
        "model": "org/name",
        "seed": 7,
    }
