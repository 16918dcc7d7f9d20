"""A shell's text told word by word, as far as it is a plain list of commands; what is more than that is left unread."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.engines.unwrap_command import Unread, simple_commands


def words(text):
    return [[word.value for word in command] for command in simple_commands(text)]


def test_plain_commands_are_told(subtests):
    for text, found in [
        ("vllm serve m --max-model-len 9", [["vllm", "serve", "m", "--max-model-len", "9"]]),
        ("cd /x && exec vllm serve 'a b'", [["cd", "/x"], ["exec", "vllm", "serve", "a b"]]),
        ("vllm serve m > log 2>&1 &", [["vllm", "serve", "m"]]),
        ("vllm serve m 2>/dev/null | tee log", [["vllm", "serve", "m"], ["tee", "log"]]),
        ('vllm serve "a\\"b" c\\ d', [["vllm", "serve", 'a"b', "c d"]]),
        ("vllm serve m \\\n  --port 1\n", [["vllm", "serve", "m", "--port", "1"]]),
        ("A=1 B='2 3' vllm serve m", [["A=1", "B=2 3", "vllm", "serve", "m"]]),
        ("vllm serve a#b c!", [["vllm", "serve", "a#b", "c!"]]),
    ]:
        with subtests.test(text=text, found=found):
            assert words(text) == found


def test_a_word_that_the_shell_expands_is_kept_as_it_is_written(subtests):
    for word in ["$M", '"$M"', "${M}", "~/m", "*.yaml", "{a,b}", "m$1"]:
        with subtests.test(word=word):
            (command,) = simple_commands(f"vllm serve {word} --port 1")
            assert (command[2].value, type(command[2].value)) == (word, Unread)
            assert command[3].value == "--port"


def test_what_is_more_than_a_list_of_commands_is_not_read(subtests):
    for text in [
        "for i in 1 2; do vllm serve m; done",
        "if true; then vllm serve m; fi",
        "(vllm serve m)",
        "{ vllm serve m; }",
        "vllm serve $(cat model)",
        "vllm serve `cat model`",
        'vllm serve "$(cat model)"',
        "vllm serve ${M:-a b}",
        "vllm serve <<EOF\nx\nEOF",
        "vllm serve m # the model",
        "vllm serve 'm",
        'vllm serve "m',
        "f() { vllm serve m; }",
    ]:
        with subtests.test(text=text):
            assert simple_commands(text) == []


def test_each_word_stands_where_it_says():
    text = "cd /x &&  vllm   serve 'a b'"
    assert [text[w.start : w.end] for command in simple_commands(text) for w in command] == [
        "cd",
        "/x",
        "vllm",
        "serve",
        "'a b'",
    ]


@given(st.text(alphabet="ab '\"\\=-;|&\n", max_size=14))
@settings(max_examples=60, deadline=None)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_what_is_read_is_what_bash_makes_of_it(text):
    found = words(f"printf '%s\\n' {text}")
    if len(found) != 1 or "&" in text or not simple_commands(f"x {text}"):
        return
    ran = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=False
    )
    if ran.returncode == 0 and not ran.stderr:
        assert ran.stdout == "".join(f"{word}\n" for word in found[0][2:] or [""])


@given(st.text(max_size=40))
def test_no_text_raises(text):
    simple_commands(text)
