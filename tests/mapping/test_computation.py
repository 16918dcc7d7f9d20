"""What identifies a computation where the user says nothing, and where they do."""

from __future__ import annotations

import functools

import pytest

import oomguard
from oomguard.mapping.computation import computation_of

LAYER, COUNTED, SEEN = 10, 0, []


class Model:
    def __init__(self, name):
        self.name_or_path = name

    def generate(self, texts):
        return texts


def digest(fn, identity=None):
    return computation_of(fn, identity).digest


def reads_the_layer(texts):
    return [(text, LAYER) for text in texts]


def counts(texts):
    global COUNTED  # noqa: PLW0603 - what is tested
    COUNTED += 1
    SEEN.extend(texts)
    return texts


def test_another_text_in_the_code_is_another_computation():
    def made(prompt):
        namespace = {}
        exec(f"def ask(texts):\n    return [{prompt!r} + text for text in texts]", namespace)
        return namespace["ask"]

    assert digest(made("Summarise: ")) == digest(made("Summarise: "))
    assert digest(made("Summarise: ")) != digest(made("Translate: "))


def test_a_number_that_the_function_reads_from_around_it_counts(monkeypatch):
    before = digest(reads_the_layer)
    monkeypatch.setitem(globals(), "LAYER", 11)
    assert digest(reads_the_layer) != before


def test_a_helper_of_the_same_module_counts_with_what_it_reads(monkeypatch):
    def calls_it(texts):
        return reads_the_layer(texts)

    before = digest(calls_it)
    monkeypatch.setitem(globals(), "LAYER", 11)
    assert digest(calls_it) != before


def test_what_the_function_itself_counts_up_does_not_count():
    before = digest(counts)
    counts(["a"])
    assert digest(counts) == before


def test_a_model_counts_by_its_name():
    def using(model):
        def answer(texts):
            return model.generate(texts)

        return answer

    one, same, two = using(Model("org/one")), using(Model("org/one")), using(Model("org/two"))
    assert digest(one) == digest(same)
    assert digest(one) != digest(two)
    assert digest(Model("org/one").generate) != digest(Model("org/two").generate)


def test_a_model_without_a_name_has_to_be_said(subtests):
    def check(nameless):
        def answer(texts):
            return nameless.generate(texts)

        with pytest.raises(oomguard.UsageError, match="nameless, a Model without a name") as caught:
            computation_of(answer, None)
        assert 'identity={"model"' in caught.value.hint
        assert digest(answer, {"model": "mine"}) != digest(answer, {"model": "other"})

    for name, nameless in [
        ("empty", Model("")),
        ("none", Model(None)),
    ]:
        with subtests.test(name):
            check(nameless)


def test_what_is_said_stands_in_the_place_of_the_code():
    def made(addend):
        return eval(f"lambda texts: [text + {addend} for text in texts]")

    def named(texts):
        return texts

    before = digest(named, {"seed": 0})
    named.__code__ = (lambda texts: texts[:]).__code__
    assert digest(named, {"seed": 0}) == before
    assert digest(made(1), {"seed": 0}) != digest(made(2), {"seed": 0})  # all lambdas have one name


def test_functions_of_other_names_never_share_results():
    assert digest(counts, {"seed": 0}) != digest(reads_the_layer, {"seed": 0})


def test_object_of_unknown_type_needs_an_explicit_one():
    class Extractor:
        def __call__(self, texts):
            return texts

    for fn in (Extractor(), Extractor().__call__, functools.partial(counts, lock=object())):
        with pytest.raises(oomguard.UsageError, match="which oomguard cannot identify"):
            computation_of(fn, None)
        computation_of(fn, {"version": 2})


def test_an_identity_without_content_is_a_mistake_that_is_named(subtests):
    for identity, told in [
        ({"model": object()}, r"identity\['model'\] is a object"),
        ("org/name", "identity must be a dictionary with names as keys, got 'org/name'"),
    ]:
        with (
            subtests.test(identity=identity, told=told),
            pytest.raises(oomguard.UsageError, match=told),
        ):
            computation_of(counts, identity)
