"""Every mistake in a user's rule file is one RuleError that says where it is and what was meant."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import RuleError
from oomguard.rules.rule_files import RuleSet, load_rules
from oomguard.rules.signature import MAX_PATTERN_CHARS
from oomguard.rules.syntax import MAX_FILE_BYTES

RULE = """\
schema = 1
code = "XX101"
cause = "lora"
title = "Adapters take the memory"
since = "0.1.0"
status = "stable"
kinds = ["cuda_oom"]
when = ["tried_bytes > 1.0"]
confidence = [ { base = 0.5 } ]
[explain]
summary = "{tried_bytes:GiB} was asked for."
why = "Adapters are loaded whole."
confirm = "Count them."
[[fix]]
setting = "max_loras"
effect = "reduces-capacity"
value = "1.0"
[[reference]]
note = "a note"
[[test]]
kind = "cuda_oom"
facts = { tried_bytes = 2 }
"""
SIGNATURE = """\
schema = 1
kind = "cuda_oom"
framework = "torch"
[[wording]]
anchor = "boom: "
pattern = 'boom: (?P<tried>[0-9]+ [KMG]iB)'
source = "nowhere"
versions = ">=1"
[[test]]
log = "boom: 3 GiB"
"""


def write(folder: Path, text: str | bytes, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(folder: Path, text: str | bytes) -> RuleError:
    path = write(folder, text)
    with pytest.raises(RuleError) as caught:
        load_rules([folder])
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(str(path))
    return caught.value


def swap(base: str, old: str, new: str) -> str:
    assert old in base
    return base.replace(old, new, 1)


def test_valid_rule_and_signature_join_the_shipped_ones(tmp_path):
    write(tmp_path, RULE, "rule.toml")
    write(tmp_path, SIGNATURE, "signature.toml")
    shipped = load_rules()

    rules = load_rules([tmp_path])

    assert rules.rule("XX101").title == "Adapters take the memory"
    assert len(rules.rules) == len(shipped.rules) + 1
    assert len(rules.signatures) == len(shipped.signatures) + 1


def test_files_in_sub_folders_are_read(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path / "a" / "b", RULE)

    assert load_rules([tmp_path]).rule("XX101")


def test_a_file_of_another_ending_is_left_alone(tmp_path):
    write(tmp_path, "not a rule", "README.md")

    assert isinstance(load_rules([tmp_path]), RuleSet)


def test_a_user_rule_overrides_ours_by_code(tmp_path):
    ours = load_rules().rules[0].code
    write(tmp_path, swap(RULE, "XX101", ours))

    rules = load_rules([tmp_path])

    assert rules.rule(ours).title == "Adapters take the memory"
    assert len(rules.rules) == len(load_rules().rules)


def test_the_later_of_two_user_folders_wins(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, swap(RULE, "Adapters take the memory", f"from {name}"))

    assert load_rules([tmp_path / "a", tmp_path / "b"]).rule("XX101").title == "from b"
    assert load_rules([tmp_path / "b", tmp_path / "a"]).rule("XX101").title == "from a"


def test_windows_line_ends_are_read(tmp_path):
    write(tmp_path, SIGNATURE.replace("\n", "\r\n"))

    assert load_rules([tmp_path])


def test_a_typo_in_a_key_is_placed_and_corrected(tmp_path):
    error = refused(tmp_path, swap(SIGNATURE, "pattern =", "patern ="))

    assert (error.key, error.line, error.column) == ("wording[0].patern", 6, 1)
    assert error.hint == "did you mean 'pattern'?"


def test_a_typo_in_a_top_level_key_is_placed_and_corrected(tmp_path):
    error = refused(tmp_path, swap(RULE, "title =", "titel ="))

    assert (error.key, error.line, error.column, error.hint) == (
        "titel",
        4,
        1,
        "did you mean 'title'?",
    )


@pytest.mark.parametrize("name", ["title", "cause", "kinds", "confidence", "status"])
def test_a_missing_key_is_named(tmp_path, name):
    error = refused(
        tmp_path, "\n".join(line for line in RULE.splitlines() if not line.startswith(f"{name} ="))
    )

    assert f"{name!r} is missing" in str(error)


def test_an_unknown_fact_in_a_condition_is_placed_and_corrected(tmp_path):
    error = refused(tmp_path, swap(RULE, '"tried_bytes > 1.0"', '"1.0 < tried_byte"'))

    assert (error.key, error.column) == ("when[0]", 7)
    assert error.hint == "did you mean 'tried_bytes'?"
    caret = str(error).splitlines()[-1]
    assert caret.index("^") - 2 == 6


def test_a_string_where_a_list_is_expected_is_refused(tmp_path):
    error = refused(tmp_path, swap(RULE, '["tried_bytes > 1.0"]', '"tried_bytes > 1.0"'))

    assert (error.key, error.line, error.column) == ("when", 8, 1)
    assert "expected list, found str" in str(error)


def test_a_boolean_is_no_number(tmp_path):
    error = refused(tmp_path, swap(RULE, "schema = 1", "schema = true"))

    assert "expected int, found bool" in str(error)


def test_a_condition_that_is_no_text_is_refused(tmp_path):
    assert refused(tmp_path, swap(RULE, '["tried_bytes > 1.0"]', "[3]")).key == "when[0]"


def test_old_operators_are_refused_with_their_new_spelling(tmp_path):
    error = refused(tmp_path, swap(RULE, "tried_bytes > 1.0", "tried_bytes > 1.0 && lora == true"))

    assert (error.key, error.column) == ("when[0]", 19)
    assert error.hint == "write and"


def test_a_condition_that_is_not_a_yes_or_no_is_refused(tmp_path):
    error = refused(tmp_path, swap(RULE, "tried_bytes > 1.0", "tried_bytes"))

    assert "expected a bool expression, but this one is a number" in str(error)


@pytest.mark.parametrize(
    ("old", "new", "key", "line", "hint"),
    [
        ('["cuda_oom"]', '["cuda_oon"]', "kinds", 7, "did you mean 'cuda_oom'?"),
        ('cause = "lora"', 'cause = "loar"', "cause", 3, "did you mean 'lora'?"),
        (
            '"reduces-capacity"',
            '"reduces-capacty"',
            "fix[0].effect",
            16,
            "did you mean 'reduces-capacity'?",
        ),
        ('"stable"', '"stabel"', "status", 6, "did you mean 'stable'?"),
        (
            "{tried_bytes:GiB}",
            "{tried_byte:GiB}",
            "explain.summary",
            11,
            "did you mean 'tried_bytes'?",
        ),
        (
            "when = [",
            'unknown = ["tried_byte"]\nwhen = [',
            "unknown",
            8,
            "did you mean 'tried_bytes'?",
        ),
    ],
    ids=["kind", "cause", "effect", "status", "fact in a text", "unknown"],
)
def test_a_word_outside_a_closed_list_is_placed_and_corrected(tmp_path, old, new, key, line, hint):
    error = refused(tmp_path, swap(RULE, old, new))

    assert (error.key, error.line, error.hint) == (key, line, hint)


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ('"cuda_oom"', '"cuda_oon"', "kind", "did you mean 'cuda_oom'?"),
        ("framework =", 'phase = "prefil"\nframework =', "phase", "did you mean 'prefill'?"),
        ("source =", 'phase = "prefil"\nsource =', "wording[0].phase", "did you mean 'prefill'?"),
        ("P<tried>", "P<tried_byte>", "wording[0].pattern", "did you mean 'tried_bytes'?"),
    ],
    ids=["kind", "phase", "phase of a wording", "group"],
)
def test_a_signature_word_outside_a_closed_list_is_corrected(tmp_path, old, new, key, hint):
    error = refused(tmp_path, swap(SIGNATURE, old, new))

    assert (error.key, error.hint) == (key, hint)


def test_an_unknown_fact_that_a_wording_states_is_refused(tmp_path):
    error = refused(tmp_path, swap(SIGNATURE, "source =", "facts = { on_cup = true }\nsource ="))

    assert "unknown fact 'on_cup'" in str(error)
    assert error.hint == "did you mean 'on_cpu'?"


def test_one_code_in_two_files_of_a_folder_is_refused(tmp_path):
    write(tmp_path, RULE, "a.toml")
    write(tmp_path, RULE, "b.toml")

    with pytest.raises(RuleError, match=r"b\.toml.*XX101 is already used by a\.toml"):
        load_rules([tmp_path])


@pytest.mark.parametrize(
    "code", ["xx101", "X101", "XX1010", "XX10", "XX101\\n", "ABCDEFGHI101", ""]
)
def test_a_code_of_another_form_is_refused(tmp_path, code):
    error = refused(tmp_path, swap(RULE, "XX101", code))

    assert (error.key, error.line) == ("code", 2)


def test_a_toml_mistake_is_placed(tmp_path):
    error = refused(tmp_path, swap(SIGNATURE, "framework = ", "framework "))

    assert (error.line, error.column) == (3, 11)
    assert "not TOML" in str(error)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    assert "not UTF-8" in str(refused(tmp_path, b"schema = 1 # \xff"))


def test_an_over_large_file_is_refused_unread(tmp_path):
    assert "larger than" in str(refused(tmp_path, b"#" * (MAX_FILE_BYTES + 1)))


def test_an_empty_file_is_refused(tmp_path):
    assert "'schema' is missing" in str(refused(tmp_path, ""))


def test_a_folder_named_like_a_rule_file_is_refused(tmp_path):
    (tmp_path / "x.toml").mkdir()

    with pytest.raises(RuleError, match="cannot read the file"):
        load_rules([tmp_path])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "is a FIFO, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    ],
    ids=["FIFO", "device"],
)
def test_false_rule_file_is_refused_without_waiting(tmp_path, make, said):
    make(tmp_path / "x.toml")

    with pytest.raises(RuleError, match=f"x.toml: cannot read the file: {said}"):
        load_rules([tmp_path])


@pytest.mark.parametrize(
    ("pattern", "column"),
    [
        ("boom:([0-9]+", 13),
        ("[9-0]", 4),
        ("a{99999999999}", 3),
        ("*", 1),
        ("a b c ([0-9]+", 14),
    ],
)
def test_a_pattern_that_does_not_compile_is_placed(tmp_path, pattern, column):
    error = refused(tmp_path, swap(SIGNATURE, "boom: (?P<tried>[0-9]+ [KMG]iB)", pattern))

    assert error.key == "wording[0].pattern"
    assert error.column is not None
    assert abs(error.column - column) <= 1


def test_an_over_long_pattern_is_refused(tmp_path):
    error = refused(tmp_path, swap(SIGNATURE, "[0-9]+", "[0-9]+" + "a" * MAX_PATTERN_CHARS))

    assert "pattern longer than" in str(error)


def test_a_pattern_nested_too_deeply_is_refused(tmp_path):
    assert "not a pattern" in str(
        refused(tmp_path, swap(SIGNATURE, "[0-9]+", "(" * 1900 + ")" * 1900))
    )


def test_a_group_that_is_no_fact_is_refused(tmp_path):
    assert "the group 'shoe_size' is not a fact" in str(
        refused(tmp_path, swap(SIGNATURE, "P<tried>", "P<shoe_size>"))
    )


def test_a_group_with_an_underscore_in_front_needs_no_fact(tmp_path):
    write(tmp_path, swap(SIGNATURE, "P<tried>", "P<_shoe_size>"))

    assert load_rules([tmp_path])


def test_a_bad_version_range_is_refused(tmp_path):
    error = refused(tmp_path, swap(SIGNATURE, '">=1"', '"1 to 2"'))

    assert (error.key, error.line) == ("wording[0].versions", 8)
    assert ">=0.8,<0.20" in str(error.hint)


@pytest.mark.parametrize("base", [RULE, SIGNATURE], ids=["rule", "signature"])
def test_a_later_schema_is_refused(tmp_path, base):
    error = refused(tmp_path, swap(base, "schema = 1", "schema = 2"))

    assert (error.key, error.line) == ("schema", 1)


@pytest.mark.parametrize(
    "text",
    [
        swap(SIGNATURE, 'kind = "cuda_oom"', 'kind = "cuda_oom"\ncontext = true'),
        swap(SIGNATURE, 'kind = "cuda_oom"\n', ""),
        swap(SIGNATURE, 'kind = "cuda_oom"', "context = false"),
    ],
    ids=["both", "neither", "context = false"],
)
def test_a_signature_is_a_kind_or_context_and_not_both(tmp_path, text):
    assert "exactly one of kind and context" in str(refused(tmp_path, text))


@pytest.mark.parametrize("anchor", ['" "', '""', '"two\\nlines"'])
def test_an_anchor_that_is_no_literal_on_one_line_is_refused(tmp_path, anchor):
    assert refused(tmp_path, swap(SIGNATURE, '"boom: "', anchor)).key == "wording[0].anchor"


@pytest.mark.parametrize(
    "row",
    [
        "[]",
        "[ { add = 0.5 } ]",
        "[ { base = 0.5, add = 0.5 } ]",
        "[ {} ]",
        "[ 1 ]",
        '[ { base = "x" } ]',
    ],
)
def test_a_confidence_without_one_base_first_is_refused(tmp_path, row):
    assert str(refused(tmp_path, swap(RULE, "[ { base = 0.5 } ]", row)).key).startswith(
        "confidence"
    )


@pytest.mark.parametrize(
    "more", ['solve = "printed_estimate"', 'lever = "shrinks it"\nmissing = "how much"']
)
def test_a_fix_has_one_way_to_its_value(tmp_path, more):
    assert refused(tmp_path, swap(RULE, 'value = "1.0"', f'value = "1.0"\n{more}')).key == "fix[0]"


def test_a_lever_says_what_is_missing(tmp_path):
    assert refused(tmp_path, swap(RULE, 'value = "1.0"', 'lever = "shrinks it"')).key == "fix[0]"


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000, "a = " + "[" * 5000 + "]" * 5000, "a = " + "{a=" * 5000],
    ids=["open", "closed", "{"],
)
def test_a_deeply_nested_file_is_refused(tmp_path, text):
    assert "nested too deeply" in str(refused(tmp_path, text))


def test_a_deeply_nested_expression_is_refused(tmp_path):
    assert (
        refused(tmp_path, swap(RULE, "tried_bytes > 1.0", "(" * 900 + "True" + ")" * 900)).key
        == "when[0]"
    )


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(RuleError, match="no such folder of rules") as caught:
        load_rules([tmp_path / "nowhere"])

    assert caught.value.hint


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    with pytest.raises(RuleError, match="no such folder of rules"):
        load_rules([write(tmp_path, RULE)])


def test_an_integer_of_thousands_of_digits_is_refused(tmp_path):
    refused(tmp_path, "schema = " + "1" * 5000)


def test_a_list_where_the_name_of_a_fact_is_expected_is_refused(tmp_path):
    refused(tmp_path, swap(RULE, "when = [", 'unknown = [["tried_bytes"]]\nwhen = ['))


def test_a_confidence_beyond_any_double_is_refused(tmp_path):
    refused(tmp_path, swap(RULE, "{ base = 0.5 }", "{ base = 0.5 }, { add = 1" + "0" * 400 + " }"))


def test_a_folder_with_an_over_long_name_is_refused(tmp_path):
    with pytest.raises(RuleError):
        load_rules([tmp_path / ("n" * 300)])


def test_a_fix_with_an_empty_value_is_refused(tmp_path):
    refused(tmp_path, swap(RULE, 'value = "1.0"', 'value = ""'))


@pytest.mark.parametrize("value", ['"x"', "[1]", "2020-01-01", "{ a = 1 }", "nan", "true"])
def test_a_fact_of_the_wrong_type_in_a_wording_is_refused(tmp_path, value):
    refused(tmp_path, swap(SIGNATURE, "source =", f"facts = {{ tried_bytes = {value} }}\nsource ="))


def test_line_of_the_second_fix_is_shown_if_it_is_at_fault(tmp_path):
    second = '[[fix]]\nsetting = "max_num_seqs"\neffect = "reduces-capacty"\nvalue = "1.0"\n'

    error = refused(tmp_path, swap(RULE, "[[reference]]", f"{second}[[reference]]"))

    assert error.key == "fix[1].effect"
    assert error.line == 20


def test_caret_is_under_the_faulty_line_of_an_expression(tmp_path):
    error = refused(tmp_path, swap(RULE, '"tried_bytes > 1.0"', '"True and\\n  tried_byte > 1.0"'))

    assert "tried_byte > 1.0" in str(error).splitlines()[-2]


# Laws -----------------------------------------------------------------------------------------------------------

scalars = (
    st.none().map(lambda _: {})
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
)
values = scalars | st.lists(scalars, max_size=3)


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def loads_or_says_why(folder: Path, text: str) -> None:
    write(folder, text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(RuleError):
        assert isinstance(load_rules([folder]), RuleSet)


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_loads_or_is_refused(tmp_path_factory, text):
    loads_or_says_why(tmp_path_factory.mktemp("rules"), text)


@settings(max_examples=30, deadline=None)
@given(
    base=st.sampled_from([RULE, SIGNATURE]),
    start=st.integers(0, 600),
    length=st.integers(0, 40),
    new=st.text(max_size=20),
)
def test_any_edit_of_a_good_file_loads_or_is_refused(tmp_path_factory, base, start, length, new):
    start %= len(base)
    loads_or_says_why(tmp_path_factory.mktemp("rules"), base[:start] + new + base[start + length :])


@settings(max_examples=30, deadline=None)
@given(
    key=st.sampled_from(
        [line for base in (RULE, SIGNATURE) for line in base.splitlines() if " = " in line]
    ),
    value=values,
)
def test_any_value_of_any_key_loads_or_is_refused(tmp_path_factory, key, value):
    base = RULE if key in RULE else SIGNATURE
    loads_or_says_why(
        tmp_path_factory.mktemp("rules"), swap(base, key, f"{key.split(' = ')[0]} = {toml(value)}")
    )


@pytest.mark.parametrize("condition", ["1", "[]", "nan", "true", "{ a = 1 }", "''"])
def test_non_text_condition_is_located_at_its_list(tmp_path, condition):
    error = refused(tmp_path, swap(RULE, 'when = ["tried_bytes > 1.0"]', f"when = [{condition}]"))

    assert (error.key, error.line, error.column) == ("when[0]", 8, 1)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('a = 1\nb = "x', 2, 7),
        ("a = [1,\n2,", 2, 3),
        ("a = '''x\ny\n", 3, 1),
        ("[a", 1, 3),
        ("a = {b = 1", 1, 11),
    ],
)
def test_what_is_never_closed_is_placed_at_the_end_of_the_file(tmp_path, text, line, column):
    error = refused(tmp_path, text)

    assert (error.line, error.column) == (line, column)


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 21) + " = 1",
        "x = 1\n [ " + " . ".join("a" * 30) + " ]",
        "[[" + ".".join(['"a.\\" b"'] * 30) + "]]",
        ".".join(["'a'"] * 20_000) + " = 1",
        "[" + "a." * 300_000 + "]",
    ],
    ids=["key", "header", "quoted header", "many quoted", "open"],
)
def test_a_key_of_many_parts_is_refused_unread(tmp_path, text):
    error = refused(tmp_path, text)

    assert "dotted key" in str(error)
    assert (error.line, error.column) == (1 + text.count("\n"), 1)


@pytest.mark.parametrize("log", [".".join("a" * 200), "1.2.3.4 " * 50, "a . b . " * 100])
def test_dots_in_a_text_are_no_key(tmp_path, log):
    assert load_rules([write(tmp_path, swap(SIGNATURE, '"boom: 3 GiB"', f'"boom: {log}"')).parent])


@pytest.mark.parametrize(
    "text",
    [
        f"{'k' * 900_000} = 1",
        swap(RULE, '"stable"', f'"{"x" * 900_000}"'),
        swap(SIGNATURE, '">=1"', f'"{"x" * 900_000}"'),
    ],
)
def test_a_mistake_is_told_in_a_few_hundred_characters(tmp_path, text):
    assert len(str(refused(tmp_path, text))) < 1500


def test_a_wording_knows_where_its_pattern_is_written(tmp_path):
    write(tmp_path, swap(SIGNATURE, 'anchor = "boom: "', 'anchors = ["boom: ", "boom"]'))

    mine = load_rules([tmp_path]).signatures[-1]

    assert [(w.anchor, w.key) for w in mine.wordings] == [
        ("boom: ", "wording[0].pattern"),
        ("boom", "wording[0].pattern"),
    ]
