"""The command of a past run to paste is word for word what was given, but for its secrets."""

from __future__ import annotations

import os
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.incident import Attempt
from oomguard.core.past_runs import PastAttempt, PastRun
from oomguard.report.history import to_paste


def run(*command: str, folder: str | None = None) -> PastRun:
    return PastRun(1, "s", command, (PastAttempt(Attempt(1, {}), command, 0.0),), folder=folder)


def as_bash_reads(line: str) -> list[bytes]:
    script = b"printf '%s\\0' " + line.encode()
    return subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.split(
        b"\0"
    )[:-1]


def test_pasteable_command_keeps_home_folders_and_names_secrets():
    line, notes = to_paste(run("sh", "/home/alice/my job.sh", "--key", "***", folder="/home/alice"))

    assert line == "sh '/home/alice/my job.sh' --key '***'"
    assert [note[:4] for note in notes] == ["*** ", "the "]
    assert "/home/alice" in notes[1]


def test_invisible_characters_stay_and_are_reported():
    for word in [
        "a\rb",
        "\x1b[31mred",
        "\u202eabc",
        "\udcff\udc80a'b\\",
        "\x9b1",
        "a\nb\rc",
        "ä\x07 $HOME",
    ]:
        line, notes = to_paste(run("x", word))

        assert as_bash_reads(line) == [b"x", os.fsencode(word)], word
        assert line.isprintable(), word
        assert any("does not show" in note for note in notes), word


texts = st.text(
    st.characters(exclude_characters="\0", exclude_categories=("Cs",))
    | st.sampled_from("\udc80\udcff\x1b'\\\r\n0a"),
    max_size=8,
)


@settings(max_examples=40)
@given(words=st.lists(texts, max_size=4))
def test_any_command_is_read_back_as_it_was_given(words: list[str]):
    line, _notes = to_paste(run("x", *words))

    assert as_bash_reads(line) == [b"x", *map(os.fsencode, words)]


def test_a_secret_that_escapes_part_from_its_name_is_hidden():
    line, _notes = to_paste(run("x", "--api-\x1b[0mkey=Hunter2secret"))

    assert "Hunter2" not in line
