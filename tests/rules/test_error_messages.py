"""Well-known error messages: true to what oomguard finds in them, and found by any part of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.core.incident import KINDS
from oomguard.diagnosis import default_rules, diagnose
from oomguard.report.explanation import messages_page
from oomguard.rules.error_messages import error_messages, find_error_messages, phases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "my-error-message.md"


def test_there_are_at_least_30_messages_in_known_phases():
    ids = [phase.id for phase in phases()]

    assert len(error_messages()) >= 30
    assert {message.phase for message in error_messages()} == set(ids)


@pytest.mark.parametrize("message", error_messages(), ids=lambda message: message.text[:40])
def test_kind_and_rule_are_what_oomguard_finds(message):
    text = message.text.replace("Exit Code:", "\n    Exit Code:")
    incident = diagnose(f"{text}\n").first_cause
    if not message.kind:
        assert incident is None
        assert not message.rule
        return
    assert incident is not None
    assert message.kind in KINDS
    assert (incident.kind, incident.causes[0].rule) == (message.kind, message.rule)
    assert message.rule in {rule.code for rule in default_rules().rules}


def test_every_message_is_found_by_its_text_with_any_numbers_and_prefix():
    for message in error_messages():
        for text in (message.text, *message.also):
            other = re.sub(r"\b(?!137|1455)\d+(?:\.\d+)?", "7.25", text)
            prefixed = f"(EngineCore pid=390) ERROR 06-02 10:14:57 [core.py:1108] {text}"
            for shown in (text, other, text.upper(), prefixed, f"'{text}'"):
                assert find_error_messages(shown)[0] is message, shown


def test_a_part_of_a_message_is_enough():
    for part, whole in [
        ("No available memory for the cache blocks", "No available memory for the cache blocks"),
        ("larger than the available KV cache memory", "To serve at least one request"),
        ("warming up sampler", "when warming up sampler"),
        ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED"),
        ("CUDA out of memory. Tried to allocate", "torch.OutOfMemoryError: CUDA out of memory"),
        ("find a valid cuDNN algorithm", "Unable to find a valid cuDNN algorithm"),
        ("see root cause above", "Engine core initialization failed"),
        ("exit code 137", "OOMKilled"),
        ("os error 1455", "paging file"),
        ("serve one request max seq len KV cache memory available needed", "To serve at least"),
    ]:
        assert whole in find_error_messages(part)[0].text, part


def test_texts_that_nobody_prints_are_not_found():
    for text in ["", "x", "hello world", "all is well today in the office", "137", "....."]:
        assert find_error_messages(text) == [], text


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == messages_page().rstrip() + "\n"


def oomguard(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oomguard", "explain", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_explain_shows_a_rule_a_kind_a_cause_and_a_message():
    for word, shown in [
        ("OG201", "What helps."),
        ("og201", "OG201: One request of max_model_len tokens"),
        ("kv_cache_none_left", "Possible causes."),
        ("host_ram", "OG408"),
        ("No available memory for the cache blocks", "Do this."),
    ]:
        run = oomguard(word)
        assert run.returncode == 0, word
        assert shown in run.stdout, word


def test_explain_uses_the_numbers_of_the_text():
    run = oomguard(
        "ValueError: Free memory on device (9.5/23.6 GiB) on startup is less than desired GPU "
        "memory utilization (0.9, 21.24 GiB)."
    )

    assert "it wants 21.24 GiB at start-up, but 9.50 GiB of 23.60 GiB is free" in run.stdout


def test_explain_knows_a_wording_that_only_a_signature_has():
    run = oomguard("RuntimeError: HIP error: out of memory")

    assert run.returncode == 0
    assert run.stdout


def test_an_unknown_code_or_text_ends_with_2_and_the_nearest_name():
    for word, hint in [
        ("OG2011", "OG201"),
        ("OG999", "did you mean"),
        ("kv_cache_none_lef", "did you mean kv_cache_none_left"),
        ("hello world", "oomguard diagnose LOG"),
        ("", "oomguard rules list"),
    ]:
        run = oomguard(word)
        assert run.returncode == 2, word
        assert hint in run.stderr, word
        assert len(run.stderr.splitlines()) == 2, word


def test_numbers_of_a_stored_message_are_marked_as_an_example():
    run = oomguard("CUDA out of memory. Tried to allocate 3.00 GiB")
    stored = oomguard(error_messages()[0].text)

    assert "are an example" in run.stdout
    assert "are an example" not in stored.stdout


def test_old_torch_and_xla_name_the_own_process_first():
    old = find_error_messages("GiB already allocated; 0 bytes free")[0]
    xla = find_error_messages("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")[0]

    assert old.do.startswith("Put the failing call under oomguard.guard")
    assert "PREALLOCATE=false" in xla.command
