"""What can be read of a damaged store is saved into a new one, and nothing that was damaged is taken for a result."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import oomguard
from oomguard.mapping.recover import recover

ITEMS = range(600)
PAGE = 4096


def words(items):
    return [f"{item} " * random.Random(item).choice((1, 30, 3000)) for item in items]


def mapped(store, model="org/name"):
    return oomguard.map(words, ITEMS, store=store, identity={"model": model})


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3 + 17)


def overwritten_in_the_middle(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // PAGE * PAGE)
        file.write(random.Random(1).randbytes(path.stat().st_size // 8))


def overwritten_here_and_there(path: Path) -> None:
    draw = random.Random(2)
    with path.open("r+b") as file:
        for _ in range(20):
            file.seek(draw.randrange(8 * PAGE, path.stat().st_size))
            file.write(draw.randbytes(700))


def test_readable_results_are_saved_and_others_recomputed(subtests, tmp_path):
    for damage in [cut, overwritten_in_the_middle, overwritten_here_and_there]:
        with subtests.test(damage=damage):
            store = tmp_path / f"{damage.__name__}.sqlite"
            mapped(store)
            damage(store)
            before = store.read_bytes()
            saved_to = tmp_path / f"saved-{damage.__name__}.sqlite"
            saved = recover(store, saved_to)
            again = mapped(saved_to)

            assert saved > len(ITEMS) / 4
            assert (again.reused, again.computed) == (saved, len(ITEMS) - saved)
            assert list(again) == words(ITEMS)
            assert store.read_bytes() == before
            assert not list(tmp_path.glob(".*"))


def test_saving_a_whole_store_keeps_every_computation_and_code(store, tmp_path, caplog):
    mapped(store)
    mapped(store, "org/other")
    caplog.clear()
    assert recover(store, tmp_path / "saved.sqlite") == 2 * len(ITEMS)
    assert [
        mapped(tmp_path / "saved.sqlite", name).computed for name in ("org/name", "org/other")
    ] == [0, 0]
    assert caplog.text == ""


def test_the_command_of_the_hint_saves_them(store, tmp_path):
    mapped(store)
    cut(store)
    with pytest.raises(oomguard.StoreError, match="it is damaged") as caught:
        mapped(store)
    command = (
        caught.value.hint.partition(": ")[2].partition(";")[0].replace("python", sys.executable, 1)
    )
    ran = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("results saved: ")
    assert mapped(tmp_path / "saved.sqlite").reused


def test_what_is_there_already_is_left_as_it_is(store, tmp_path):
    mapped(store)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(oomguard.UsageError, match="already exists"):
        recover(store, tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_of_what_is_no_store_or_nothing_no_new_one_is_made(store, tmp_path):
    store.write_bytes(random.Random(3).randbytes(3 * PAGE))
    for path, why in ((store, "nothing is readable"), (tmp_path / "none", "No such file")):
        with pytest.raises(oomguard.StoreError, match=why):
            recover(path, tmp_path / "saved.sqlite")
    with pytest.raises(oomguard.StoreError, match="No such file"):
        recover(store, tmp_path / "missing" / "saved.sqlite")
    assert sorted(path.name for path in tmp_path.iterdir() if "saved" in path.name) == []
