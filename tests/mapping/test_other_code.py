"""With an identity, another function has its own results, and results that other code computed are never taken silently."""

from __future__ import annotations

import functools
import textwrap

import oomguard

SAID = {"model": "org/name"}
MESSAGE = "Other code computed stored results of this identity"


def module(name, body):
    """Return what a module of that name defines."""
    found = {"__name__": name}
    exec(textwrap.dedent(body), found)
    return found


def extract(name="program", factor=2):
    return module(
        name,
        f"FACTOR = {factor}\ndef extract(items):\n    return [item * FACTOR for item in items]",
    )["extract"]


def results(fn, store, **identity):
    return list(oomguard.map(fn, [1, 2], store=store, identity=SAID | identity))


def test_functions_of_one_name_in_two_modules_keep_own_results(store):
    assert results(extract("helper1", 2), store) == [2, 4]
    assert results(extract("helper2", 3), store) == [3, 6]


def test_two_programs_with_equal_function_names_keep_results(store, start):
    body = """
    import sys, oomguard
    def extract(items):
        return [item {} for item in items]
    print(list(oomguard.map(extract, [1, 2], store=sys.argv[1], identity={{"model": "m"}})))
    """
    told = [start(body.format(what), store).communicate()[0].strip() for what in ("+ 1", "* 5")]
    assert told == ["[2, 3]", "[5, 10]"]


def plain(fn):
    return fn


def wrapped(fn):
    @functools.wraps(fn)
    def call(items):
        return fn(items)

    return call


def test_what_a_function_closes_over_counts(subtests, store):
    def check(decorate):
        def closure(factor):
            @decorate
            def scaled(items):
                return [item * factor for item in items]

            return scaled

        def default(factor):
            @decorate
            def scaled_by_default(items, *, by=factor):
                return [item * by for item in items]

            return scaled_by_default

        for made in (closure, default):
            own = store.with_name(f"{made.__name__}-{decorate.__name__}.sqlite")
            assert [results(made(factor), own) for factor in (2, 3)] == [[2, 4], [3, 6]]

    for decorate in [plain, wrapped]:
        with subtests.test(decorate=decorate):
            check(decorate)


def test_what_a_decorator_closes_over_counts(store):
    def adds(number):
        def decorate(fn):
            @functools.wraps(fn)
            def call(items):
                return [result + number for result in fn(items)]

            return call

        return decorate

    fn = extract()
    assert [results(adds(number)(fn), store) for number in (1, 2)] == [[3, 5], [4, 6]]


def test_a_helper_with_a_variable_of_the_same_name_hides_none(store):
    def closure(number, inner):
        def helper(item, number=inner):
            return item * number

        def both(items):
            return [helper(item) + number for item in items]

        return both

    made = [results(closure(*numbers), store) for numbers in ((1, 2), (1, 3), (2, 2))]
    assert made == [[3, 5], [4, 7], [4, 6]]


def test_an_edited_function_goes_on_with_its_results_and_is_told(store, caplog):
    results(extract(), store)
    other = module("program", "def extract(items):\n    return [-item for item in items]")[
        "extract"
    ]
    assert results(other, store) == [2, 4]
    assert f'{MESSAGE}: results=2 differs="FACTOR 2 -> (not given); the code of fn' in caplog.text
    caplog.clear()
    assert results(other, store, version=2) == [-1, -2]
    assert MESSAGE not in caplog.text


def test_a_number_of_its_module_that_changed_is_told(store, caplog):
    results(extract(), store)
    results(extract(factor=3), store)
    assert f'{MESSAGE}: results=2 differs="FACTOR 2 -> 3' in caplog.text


def test_results_of_two_codes_are_told_to_both(store, caplog):
    results(extract(), store)
    oomguard.map(extract(factor=3), [3], store=store, identity=SAID)
    caplog.clear()
    results(extract(), store)
    assert 'differs="FACTOR 3 -> 2' in caplog.text


def test_another_docstring_and_other_lines_are_not_told(store, caplog):
    one = 'FACTOR = 2\ndef extract(items):\n    """Do."""\n    return [item * FACTOR for item in items]'
    other = """
        FACTOR = 2


        def extract(items):
            '''Say what it does.'''
            # and how
            return [
                item * FACTOR
                for item in items
            ]
        """
    results(module("program", one)["extract"], store)
    assert results(module("program", other)["extract"], store) == [2, 4]
    assert caplog.text == ""


def test_any_code_is_taken_where_the_user_says_so(store, caplog):
    results(extract(), store)
    assert results(extract(factor=3), store, code="any") == [2, 4]
    assert caplog.text == ""


def test_renamed_function_continues_under_its_stated_old_name(store, caplog):
    results(extract(), store)
    renamed = module(
        "program", "FACTOR = 2\ndef renamed(items):\n    return [item * FACTOR for item in items]"
    )["renamed"]
    assert oomguard.map(renamed, [1], store=store, identity=SAID).reused == 0
    assert 'identity={"function": "program.extract", ...}' in caplog.text
    assert (
        oomguard.map(
            renamed, [1], store=store, identity={**SAID, "function": "program.extract"}
        ).reused
        == 1
    )


def test_name_in_a_closure_stands_for_its_value(store, caplog):
    def on(device):
        def answer(items):
            return [f"{item} on {device}" for item in items]

        return answer

    said = {"device": "any", "code": "any"}
    assert results(on("cuda:0"), store, **said) == results(on("cuda:1"), store, **said)
    assert caplog.text == ""
    results(on("cuda:0"), store, device=0)
    results(on("cuda:1"), store, device=0)
    assert f'{MESSAGE}: results=2 differs="device cuda:0 -> cuda:1' in caplog.text


def test_a_changed_number_of_an_object_is_told(store, caplog):
    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def run(self, items):
            return [item * self.factor for item in items]

    results(Scaled(2).run, store)
    results(Scaled(3).run, store)
    assert f'{MESSAGE}: results=2 differs="self.factor 2 -> 3' in caplog.text
