"""Settings that a function reads from dicts, lists and namespaces count by their content."""

from __future__ import annotations

import argparse
import types
from pathlib import Path

import torch

import oomguard
from oomguard.mapping import computation
from oomguard.mapping.computation import computation_of

SETTINGS = {"temperature": 0.7, "stop": ["\n"]}


def reads_settings(texts):
    return [(text, SETTINGS["temperature"]) for text in texts]


def digest(fn, identity=None):
    return computation_of(fn, identity).digest


def closing_over(value):
    def fn(texts):
        return [(text, value) for text in texts]

    return fn


def test_content_that_a_function_closes_over_is_told_apart(subtests):
    for made in [
        lambda layer: {"layer": layer},
        lambda layer: [layer],
        lambda layer: {layer},
        lambda layer: ({"layer": [layer]}, None),
        lambda layer: {3: layer},
        lambda layer: argparse.Namespace(layer=layer),
        lambda layer: argparse.Namespace(out=Path(f"layer{layer}")),
        lambda layer: {"nested": types.SimpleNamespace(layer=layer)},
        lambda layer: torch.full((4,), layer),
        lambda layer: {"vector": torch.full((4,), layer)},
    ]:
        with subtests.test(made=made):
            assert digest(closing_over(made(1))) == digest(closing_over(made(1)))
            assert digest(closing_over(made(1))) != digest(closing_over(made(2)))


def test_a_changed_setting_of_the_module_is_never_stale(store, monkeypatch):
    assert list(oomguard.map(reads_settings, ["a"], store=store)) == [("a", 0.7)]
    monkeypatch.setitem(SETTINGS, "temperature", 0.0)
    assert list(oomguard.map(reads_settings, ["a"], store=store)) == [("a", 0.0)]


def test_under_an_identity_a_changed_setting_is_told(store, monkeypatch, caplog):
    for temperature in (0.7, 0.0):
        monkeypatch.setitem(SETTINGS, "temperature", temperature)
        oomguard.map(reads_settings, ["a"], store=store, identity={"seed": 0})
    assert "Other code computed stored results" in caplog.text
    assert "'temperature': 0.0" in caplog.text


def test_content_that_does_not_count_is_told_once(subtests, caplog, monkeypatch):
    for name, held in [
        ("large", list(range(5000))),
        ("object", {"lock": object()}),
    ]:
        with subtests.test(name):
            monkeypatch.setattr(computation, "_told_of", set())
            for _ in range(2):
                digest(closing_over(held))
            assert (
                caplog.text.count(
                    f"Fn reads value, a {type(held).__name__} that is large or contains objects"
                )
                == 1
            )


def test_what_a_function_notes_in_a_dict_or_list_is_no_setting():
    seen, counts, memo, place = [], {"calls": 0}, {}, types.SimpleNamespace(last=None, count=0)

    def notes(texts):
        counts["calls"] += 1
        place.last = texts[-1]
        place.count += 1
        for text in texts:
            if text not in memo:
                memo[text] = text.upper()
            seen.append(text)
        return [memo[text] for text in texts]

    before = digest(notes)
    notes(["a", "b"])
    assert digest(notes) == before


def test_a_setting_beside_a_note_still_counts():
    def made(settings):
        memo = {}

        def fn(texts):
            for text in texts:
                memo[text] = text * settings["factor"]
            return [memo[text] for text in texts]

        return fn

    assert digest(made({"factor": 1})) != digest(made({"factor": 2}))
