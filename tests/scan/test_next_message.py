"""Where a message is over: what the next one says, of another start or of another failure, is not read into it."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB
from oomguard.diagnosis import default_rules
from oomguard.rules.signature import Signature
from oomguard.scan.lines import peel
from oomguard.scan.pattern_search import SearchTime, match, open_window
from oomguard.scan.scan import scan
from oomguard.scan.source import Line

START = "(EngineCore pid=7) INFO 11-23 17:12:01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./tiny', max_seq_len={}"
RECORD = "INFO 11-23 17:12:01 [core.py:133] Initializing a V1 LLM engine (v0.32.0)"
TOO_LONG = (
    "(EngineCore pid=7) ERROR 11-23 17:12:02 [core.py:1510] ValueError: To serve at least one request with the model's max seq len ({}),"
    " ({} GiB KV cache is needed, which is larger than the available KV cache memory (0.5 GiB). Based on the available memory, the"
    " estimated maximum model length is 1792. Try increasing `gpu_memory_utilization`"
)
WRAPPER = "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"


def with_clauses() -> list[Signature]:
    return [
        signature
        for signature in default_rules().signatures
        if signature.kind and signature.clauses
    ]


def facts(signature: Signature, lines: list[str], count: int) -> list[object]:
    """What each wording reads at each of the first lines."""
    rows = [(order, Line(order, 0, text), peel(text)) for order, text in enumerate(lines, 1)]
    found: list[object] = []
    for at, text in enumerate(lines[:count]):
        for wording in (each for each in signature.wordings if each.anchor in text):
            window = open_window(rows[: at + 1], [(signature, wording)])
            for order, line, plain in rows[at + 1 :]:
                window.extend(line, plain, order)
            hit = match(signature, wording, window, SearchTime())
            found.append(hit and {name: fact.value for name, fact in hit.facts.items()})
    return found


@pytest.mark.parametrize("wrapper", [[], [WRAPPER]], ids=["alone", "wrapped"])
def test_two_starts_with_the_same_pids_are_two_failures(
    wrapper: list[str],
):
    log = [START.format(32768), TOO_LONG.format(32768, "4.0"), *wrapper]
    log += [START.format(4096), TOO_LONG.format(4096, "1.0"), *wrapper]
    found = scan([Line(number, 0, text) for number, text in enumerate(log, 1)], default_rules())

    told = [
        (
            i.kind,
            i.start,
            i.facts["max_model_len_tokens"].value,
            i.facts["kv_cache_needed_bytes"].value,
        )
        for i in found.incidents
    ]
    kind = "kv_cache_too_small_for_max_len"
    assert told == [(kind, 1, 32768, 4 * GIB), (kind, 2, 4096, GIB)]


@pytest.mark.parametrize("begins", ["record", "exception"])
@pytest.mark.parametrize("signature", with_clauses(), ids=lambda signature: signature.name)
def test_no_message_takes_figures_of_another_one_behind_it(signature: Signature, begins: str):
    logs = [test["log"].splitlines() for test in signature.tests if not test.get("expect_no_match")]
    for one in logs:
        alone = facts(signature, one, len(one))
        for other in logs:
            behind = (
                [RECORD, *other]
                if begins == "record"
                else [f"RuntimeError: {other[0]}", *other[1:]]
            )
            beside = facts(signature, [*one, *behind], len(one))
            changed = [
                (own, now)
                for own, now in zip(alone, beside, strict=True)
                if own is not None and own != now
            ]
            assert not changed, (one, other)
