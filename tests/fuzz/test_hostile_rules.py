"""Rule files written to hurt: refused with file, key and column, or timed out, within two seconds each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oomguard.core.errors import RuleError
from oomguard.rules.rule_files import RuleSet, load_rules
from support.each import each

LIMIT_S = 2.0  # of processor time
CHILD_S = 100  # what a process that hangs is given
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
[[test]]
log = "RuntimeError: boom: 3 GiB"
"""
PATTERN_LINE = "pattern = 'boom: (?P<tried>[0-9]+ [KMG]iB)'"


def load(folder: Path, text: str | bytes) -> RuleSet:
    """Load the file, or raise its RuleError, within the limit."""
    (folder / "hostile.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.process_time()
    try:
        return load_rules([folder])
    finally:
        assert time.process_time() - began <= LIMIT_S


def refused(folder: Path, text: str | bytes, *, key: str | None, column: bool) -> RuleError:
    with pytest.raises(RuleError) as caught:
        load(folder, text)
    error = caught.value
    assert error.path == str(folder / "hostile.toml")
    if key is not None:
        assert error.key is not None
        assert error.key.startswith(key)
    if column:
        assert error.column is not None
        assert f"column {error.column}" in str(error)
    assert len(str(error)) < 2000  # the hostile text is not printed back whole
    return error


def in_child(
    folder: Path, text: str, log: str, *, key: str = "wording[0].pattern"
) -> dict[str, Any]:
    """Load the file and read a log with it in a process of its own; both stay within the limit."""
    (folder / "hostile.toml").write_text(text)
    command = [sys.executable, str(Path(__file__).with_name("hostile_child.py")), str(folder)]
    try:
        run = subprocess.run(
            command, input=log, capture_output=True, text=True, timeout=CHILD_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {CHILD_S} s")
    assert run.returncode == 0, run.stderr[-1500:]
    answer: dict[str, Any] = json.loads(run.stdout)
    assert answer["load_s"] <= LIMIT_S
    assert answer["scan_s"] <= LIMIT_S
    if answer["refused"]:
        assert answer["refused"]["path"] == str(folder / "hostile.toml")
        assert answer["refused"]["key"] == key
        assert len(answer["refused"]["text"]) < 2000
    return answer


def with_pattern(pattern: str) -> str:
    assert PATTERN_LINE in SIGNATURE
    return SIGNATURE.replace(PATTERN_LINE, f"pattern = '''{pattern}'''")


# The innocent files these are made from are accepted: what follows is refused for its hostility alone.
@each("text", [RULE, SIGNATURE])
def test_the_innocent_file_is_accepted(tmp_path, text):
    assert load(tmp_path, text).signatures


CATASTROPHIC = {
    "nested quantifiers": r"boom: (a+)+$",
    "overlapping branches": r"boom: (?:a|aa|aaa)+$",
    "backreference": r"boom: (?P<_x>a+)(?:a+)*(?P=_x)+b",
    "recursion": r"boom: (?P<_r>a(?&_r)?a?)*$",
    "fuzzy": r"(?:boom: aaaaaaaaaaaaaaaaaaaa){e<=15}(?:b+)+c",
}


@each("pattern", CATASTROPHIC.values())
def test_a_catastrophic_pattern_is_refused_or_timed_out(tmp_path, pattern):
    answer = in_child(
        tmp_path,
        with_pattern(pattern),
        "\n".join(f"RuntimeError: boom: {'a' * n}!" for n in (24, 40, 400, 3000)),
    )

    if answer["refused"]:
        assert answer["refused"]["column"] is not None
    told = " ".join(answer["notes"])
    if told:  # a search was given up: it is told whose
        assert "hostile.toml" in told
        assert "wording[0].pattern" in told
    else:
        assert answer["refused"] or pattern != CATASTROPHIC["overlapping branches"], (
            "neither refused nor told"
        )


def test_a_pattern_that_times_out_hides_no_other_incident(tmp_path):
    real = (
        "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.\n"
    )
    answer = in_child(
        tmp_path,
        with_pattern(CATASTROPHIC["overlapping branches"]),
        f"RuntimeError: boom: {'a' * 3000}!\n{real}",
    )

    assert answer["refused"] or answer["kinds"] == ["cuda_oom"]


HUGE = {
    "repetition": r"boom: a{1,100000000}",
    "nested repetition": r"boom: (?:(?:a{1,9999}){1,9999}){1,9999}",
    "many branches": "boom: (?:" + "|".join(f"a{i}" for i in range(700)) + ")*$",
}


@each("pattern", HUGE.values())
def test_a_huge_repetition_costs_neither_time_nor_memory(tmp_path, pattern):
    answer = in_child(tmp_path, with_pattern(pattern), f"RuntimeError: boom: {'a' * 5000}\n")

    assert answer["grown_kib"] < 200 * 1024


BROKEN_PATTERNS = {
    "open group": r"boom: (?P<tried>x",
    "open class": "boom: [a-",
    "bad escape": r"boom: \g<nope>",
    "lone quantifier": "boom: *?+*",
    "unknown group reference": r"boom: (?P=nope)",
    "unknown property": r"boom: \p{Nope}",
    "reversed range": "boom: [z-a]",
    "reversed repetition": "boom: a{5,2}x(",
}


@each("pattern", BROKEN_PATTERNS.values())
def test_a_broken_pattern_is_refused_at_its_column(tmp_path, pattern):
    refused(tmp_path, with_pattern(pattern), key="wording[0].pattern", column=True)


def test_a_pattern_of_a_hundred_thousand_characters_is_refused(tmp_path):
    refused(
        tmp_path, with_pattern("boom: " + "x" * 100_000), key="wording[0].pattern", column=False
    )


def test_a_pattern_of_a_thousand_open_groups_is_refused(tmp_path):
    refused(
        tmp_path,
        with_pattern("boom: " + "(" * 3000 + ")" * 900),
        key="wording[0].pattern",
        column=False,
    )


def test_deep_groups_are_refused_or_harmless(tmp_path):
    answer = in_child(
        tmp_path, with_pattern("boom: " + "(?:" * 990 + "a" + ")" * 990), "RuntimeError: boom: a\n"
    )

    assert answer["refused"] or answer["kinds"] == ["cuda_oom"]


# A key's value of another type: file, key, line and column.
SIGNATURE_TYPES = [
    ("schema = 1", "schema = '1'", "schema"),
    ("schema = 1", "schema = true", "schema"),
    ("schema = 1", "schema = 1.0", "schema"),
    ("schema = 1", "schema = 2", "schema"),
    ('kind = "cuda_oom"', "kind = 1", "kind"),
    ('kind = "cuda_oom"', 'kind = ["cuda_oom"]', "kind"),
    ('kind = "cuda_oom"', 'kind = "CUDA_OOM"', "kind"),
    ('framework = "torch"', "framework = 1979-05-27", "framework"),
    ('framework = "torch"', 'framework = "torch"\ncontext = 1', "context"),
    ('anchor = "boom: "', "anchor = 1", "wording[0].anchor"),
    ('anchor = "boom: "', 'anchor = ""', "wording[0].anchor"),
    ('anchor = "boom: "', "anchor = '''\na\nb'''", "wording[0].anchor"),
    (PATTERN_LINE, "pattern = []", "wording[0].pattern"),
    ('source = "nowhere"', "source = {a = 1}", "wording[0].source"),
    ('source = "nowhere"', 'source = "x"\nversions = "about 3"', "wording[0].versions"),
    ('source = "nowhere"', 'source = "x"\nversions = 3', "wording[0].versions"),
    ('log = "RuntimeError: boom: 3 GiB"', "log = nan", "test[0].log"),
    ('log = "RuntimeError: boom: 3 GiB"', 'log = "x"\nexpect = []', "test[0].expect"),
    (
        'log = "RuntimeError: boom: 3 GiB"',
        'log = "x"\nexpect_no_match = "no"',
        "test[0].expect_no_match",
    ),
    ('framework = "torch"', 'framework = "torch"\nframwork = "torch"', "framwork"),
]
RULE_TYPES = [
    ('code = "XX101"', "code = 101", "code"),
    ('code = "XX101"', 'code = "../../etc"', "code"),
    ('code = "XX101"', 'code = "XX1011111"', "code"),
    ('cause = "lora"', "cause = []", "cause"),
    ('cause = "lora"', 'cause = "Lora"', "cause"),
    ('cause = "lora"', 'cause = "lor\\u0430"', "cause"),
    ('title = "Adapters take the memory"', "title = 0", "title"),
    ('status = "stable"', 'status = "live"', "status"),
    ('kinds = ["cuda_oom"]', 'kinds = "cuda_oom"', "kinds"),
    ('kinds = ["cuda_oom"]', "kinds = [1]", "kinds"),
    ('kinds = ["cuda_oom"]', 'kinds = [["cuda_oom"]]', "kinds"),
    ('kinds = ["cuda_oom"]', "kinds = [{a = 1}]", "kinds"),
    ('when = ["tried_bytes > 1.0"]', 'when = "tried_bytes > 1.0"', "when"),
    ('when = ["tried_bytes > 1.0"]', "when = [1]", "when[0]"),
    ('when = ["tried_bytes > 1.0"]', "when = [[]]", "when[0]"),
    ('when = ["tried_bytes > 1.0"]', "when = [nan]", "when[0]"),
    ("confidence = [ { base = 0.5 } ]", "confidence = 0.5", "confidence"),
    ("confidence = [ { base = 0.5 } ]", "confidence = [0.5]", "confidence"),
    ("confidence = [ { base = 0.5 } ]", "confidence = [ { base = nan } ]", "confidence"),
    ("confidence = [ { base = 0.5 } ]", "confidence = [ { base = inf } ]", "confidence"),
    ("confidence = [ { base = 0.5 } ]", "confidence = [ { base = 7 } ]", "confidence"),
    ("confidence = [ { base = 0.5 } ]", "confidence = [ { base = 0.5, add = 0.1 } ]", "confidence"),
    ("confidence = [ { base = 0.5 } ]", "confidence = []", "confidence"),
    ('summary = "{tried_bytes:GiB} was asked for."', "summary = 1", "explain.summary"),
    ('summary = "{tried_bytes:GiB} was asked for."', 'summary = "{nope:GiB}"', "explain.summary"),
    ('setting = "max_loras"', "setting = 3", "fix[0].setting"),
    ('effect = "reduces-capacity"', 'effect = "harmless"', "fix[0].effect"),
    ('value = "1.0"', "value = 1.0", "fix[0].value"),
    ('value = "1.0"', 'value = ""', "fix[0].value"),
    ('note = "a note"', "note = false", "reference[0].note"),
    ("facts = { tried_bytes = 2 }", "facts = 2", "test[0].facts"),
]


@each(("old", "new", "key"), SIGNATURE_TYPES)
def test_a_wrong_type_in_a_signature_is_refused_at_its_key(tmp_path, old, new, key):
    assert old in SIGNATURE
    error = refused(tmp_path, SIGNATURE.replace(old, new, 1), key=key, column=False)
    assert error.line is not None or error.column is not None


@each(("old", "new", "key"), RULE_TYPES)
def test_a_wrong_type_in_a_rule_is_refused_at_its_key(tmp_path, old, new, key):
    assert old in RULE
    error = refused(tmp_path, RULE.replace(old, new, 1), key=key, column=False)
    assert error.line is not None or error.column is not None or error.key != key


HOSTILE_CONDITIONS = {
    "unknown fact": "nope > 1.0",
    "no boolean": "tried_bytes",
    "text beside number": "tried_bytes > '1'",
    "a call": "exec('x')",
    "open bracket": "(tried_bytes > 1.0",
    "deep brackets": "(" * 3000 + "True" + ")" * 3000,
    "brackets within the length": "(" * 900 + "True" + ")" * 900,
    "deep not": "not " * 490 + "True",
    "deep minus": "-" * 1990 + "tried_bytes > 1",
    "deep choice": "True if True else " * 115 + "True",
    "long chain": " and ".join(["tried_bytes > 1.0"] * 20_000),
    "towering power": "9 ** 9 ** 9 ** 9 ** 9 > tried_bytes",
    "shift": "1 << 1000000000000 > tried_bytes",
    "huge text": "'a' * 1000000000 == 'a'",
    "nul": "tried_bytes > 1.0 \x01",
    "big integer": "tried_bytes > " + "9" * 5000,
    "nested loops": "[[[x for x in 'abc'] for y in 'abc'] for z in 'abc'] == model",
    "attributes": "().__class__.__base__.__subclasses__() == model",
    "function": "(lambda: True)()",
    "assignment": "(tried_bytes := 9) > 1",
    "formatted text": "f'{tried_bytes:>99999999}' == model",
    "the language of old files": "tried_bytes > 1.0 && true",
    "empty": "",
    "statement": "tried_bytes > 1.0; True",
    "look-alike letter": "tr\u0456ed_bytes > 1.0",
}


@each("condition", HOSTILE_CONDITIONS.values())
def test_a_hostile_condition_is_refused_at_its_key(tmp_path, condition):
    escaped = condition.replace('"', '\\"').replace("\x01", "\\u0001")
    refused(
        tmp_path, RULE.replace('"tried_bytes > 1.0"', f'"{escaped}"'), key="when[0]", column=False
    )


def test_the_longest_condition_is_evaluated_in_time(tmp_path):
    nest = " and ".join(["(9.5 * tried_bytes / 2) > 1 - -1"] * 52)
    assert 1800 < len(nest) < 2000
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.\n"
    rule = RULE.replace('"tried_bytes > 1.0"', f'"tried_bytes > 1.0", "{nest}"')
    answer = in_child(tmp_path, rule, text, key="when[1]")

    assert not answer["refused"]
    assert answer["kinds"] == ["cuda_oom"]


BROKEN_TOML = {
    "duplicate key": SIGNATURE.replace("schema = 1", "schema = 1\nschema = 1"),
    "duplicate table": RULE + "[explain]\nsummary = 'x'\n",
    "table over value": RULE + "[title]\nx = 1\n",
    "open string": SIGNATURE + 'x = "abc',
    "open array": "x = [" + "1, " * 1000,
    "control character": SIGNATURE.replace("nowhere", "no\x00where"),
    "bare carriage return": SIGNATURE.replace("nowhere", "no\rwhere"),
    "bad escape": SIGNATURE.replace("nowhere", "\\U00110000"),
    "lone surrogate escape": SIGNATURE.replace("nowhere", "\\ud800"),
    "html": "<!doctype html><title>404</title>",
    "json": '{"schema": 1}',
}


@each("text", BROKEN_TOML.values())
def test_broken_toml_is_refused_at_its_line_and_column(tmp_path, text):
    error = refused(tmp_path, text, key=None, column=False)
    assert (error.line is not None and error.column is not None) or "end of document" in str(error)


HOSTILE_FILES = {
    "deep arrays": b"x = " + b"[" * 100_000,
    "deep closed arrays": b"x = " + b"[" * 5000 + b"]" * 5000,
    "deep inline tables": b"x = " + b"{a = " * 5000 + b"1" + b"}" * 5000,
    "deep dotted key": b".".join([b"a"] * 20_000) + b" = 1",
    "deep table header": b"[" + b".".join([b"a"] * 20_000) + b"]\n",
    "a number of a million digits": b"schema = " + b"9" * 1_000_000,
    "larger than a megabyte": SIGNATURE.encode() + b"# " + b"x" * (2 << 20),
    "a line of a megabyte": b"x" * ((1 << 20) - 1),
    "a hundred thousand wordings": b"schema = 1\n" + b"[[wording]]\n" * 80_000,
    "a hundred thousand keys": b"".join(b"k%d = 1\n" % i for i in range(60_000)),
    "utf-16": SIGNATURE.encode("utf-16"),
    "latin-1": SIGNATURE.replace("nowhere", "né").encode("latin-1"),
    "cut character": SIGNATURE.encode() + b"# \xf0\x9f\x94",
    "gzip": b"\x1f\x8b\x08\x00" + bytes(64),
    "nul bytes": bytes(1000),
    "empty": b"",
}


@each("content", HOSTILE_FILES.values())
def test_a_hostile_file_is_refused_by_name(tmp_path, content):
    refused(tmp_path, content, key=None, column=False)


UNICODE_TRICKS = {
    "full-width key": SIGNATURE.replace("kind =", '"\uff4bind" ='),
    "cyrillic key": SIGNATURE.replace("kind =", '"k\u0456nd" ='),
    "key with an invisible space": SIGNATURE.replace("kind =", '"kind\u200b" ='),
    "value with an invisible space": SIGNATURE.replace("cuda_oom", "cuda_oom\u200b"),
    "group that is no fact by one letter": with_pattern("boom: (?P<tri\u0435d>[0-9]+ [KMG]iB)"),
}


@each("text", UNICODE_TRICKS.values())
def test_letters_that_only_look_right_are_refused(tmp_path, text):
    refused(tmp_path, text, key=None, column=False)


def test_rule_file_escapes_never_reach_the_terminal(tmp_path):
    (tmp_path / "hostile.toml").write_text(
        RULE.replace('cause = "lora"', 'cause = "\\u001b]0;owned\\u0007\\u001b[31mlora"')
    )
    command = [sys.executable, "-m", "oomguard", "diagnose", "--rules", str(tmp_path), "-"]
    result = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)

    assert result.returncode == 2
    assert b"hostile.toml" in result.stderr
    assert b"\x1b" not in result.stdout + result.stderr
    assert b"Traceback" not in result.stderr
