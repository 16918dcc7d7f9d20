"""How a run ended, for Kubernetes and for SLURM."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from oomguard.analyst.outcome import Outcome
from oomguard.cluster.run_end import (
    MOST_BYTES,
    comment_of,
    message_place,
    truncate_utf8,
)
from oomguard.core.incident import Attempt
from support.supervising import run

ENGINE = Path(__file__).parents[1] / "analyst" / "fake_engine.py"


FAILS = (sys.executable, str(ENGINE), "--max-model-len", "32768")


def test_failed_run_records_cause_numbers_and_change(tmp_path):
    place = tmp_path / "termination-log"
    ran = run("--termination-message", str(place), command=FAILS)
    assert ran.returncode == 1
    text = place.read_text()
    assert "One request of 32768 tokens needs about 0.02 GiB" in text
    assert "max_model_len_too_large" in text
    assert "Lower max_model_len from 32768 to 1792 (reduces-capacity): --max-model-len 1792" in text
    assert text.endswith("exit status 1 after 1 attempt")


def test_other_failure_is_its_status_and_success_leaves_nothing(tmp_path):
    place = tmp_path / "message"
    run("--termination-message", str(place), command=("sh", "-c", "exit 3"))
    assert place.read_text() == "oomguard: exit status 3\n  exit status 3 after 1 attempt"
    place.unlink()
    run("--termination-message", str(place), command=("true",))
    assert not place.exists()


def test_a_crash_loop_says_that_it_is_one(tmp_path):
    place = tmp_path / "message"
    run(
        "--restart",
        "on-failure",
        "--termination-message",
        str(place),
        command=("sh", "-c", "exit 3"),
    )
    assert (
        "note: crash loop: 3 starts in a row ended in the same way: exit status 3"
        in place.read_text()
    )
    assert place.read_text().endswith("exit status 3 after 3 attempts")


def test_unwritable_path_is_refused_before_the_start(tmp_path):
    ran = run(
        "--termination-message",
        str(tmp_path / "no" / "where"),
        command=("touch", str(tmp_path / "ran")),
    )
    assert ran.returncode == 2
    assert "no/where: oomguard cannot write to this folder" in ran.stderr
    assert not (tmp_path / "ran").exists()


def test_only_in_a_pod_it_goes_to_kubernetes_own_place_by_itself():
    assert message_place(None, {}) is None
    assert message_place("x", {}) == Path("x")


@given(st.text(), st.integers(4, 100))
def test_a_cut_text_is_whole_characters_of_at_most_so_many_bytes(text, most):
    shown = truncate_utf8(text, most)
    assert len(shown.encode("utf-8", "replace")) <= most
    assert shown == text or text.encode("utf-8", "replace").decode().startswith(
        shown.removesuffix("…")
    )


def test_a_long_message_is_cut_to_what_kubernetes_takes():
    assert len(truncate_utf8("ü" * 5000, MOST_BYTES).encode()) <= MOST_BYTES


def test_a_comment_of_a_long_cause_keeps_the_status():
    outcome = Outcome(3, (Attempt(1, {}, (), None, 3, "ü" * 400),), None)
    assert comment_of(outcome).endswith("…; exit status 3 after 1 attempt")
    assert len(comment_of(outcome).encode()) <= 250


def test_a_message_names_the_signal_that_ended_the_command(tmp_path):
    place = tmp_path / "message"
    run("--termination-message", str(place), command=("sh", "-c", "kill -9 $$"))
    assert place.read_text().startswith("oomguard: exit status 137, signal 9 (KILL)\n")
