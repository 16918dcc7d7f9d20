"""What a user holds shows itself without secrets, by whatever Python turns it into a text."""

from __future__ import annotations

import pprint
import subprocess
import sys
from dataclasses import is_dataclass

import oomguard
from oomguard import comparison as compared
from oomguard.core import facts, incident
from oomguard.core.facts import Fact
from oomguard.core.incident import (
    Attempt,
    Cause,
    Diagnosis,
    Effect,
    EngineStart,
    Evidence,
    Incident,
    Patch,
    SettingInForce,
)
from oomguard.core.records import Record
from oomguard.core.redact import unmasked
from oomguard.guarding.advice import note
from oomguard.report.html import to_html
from oomguard.report.json import to_json
from oomguard.report.markdown import to_markdown
from support.each import each

SECRET = "Hunter2!x"
LINE = Evidence(
    f"non-default args: mysql -p{SECRET} FOO_KEY={SECRET} 'auth': --auth {SECRET} \x1b[31m", 3
)
LADEN = Incident(
    "cuda_oom",
    f"DBPASS={SECRET} curl -u me:{SECRET} host",
    facts={"model": Fact("model", f"https://me:{SECRET}@host/m")},
    settings={"api_key": SettingInForce("api_key", SECRET, True, "printed")},
    evidence=(LINE,),
    wrappers=(LINE,),
    causes=(Cause("unknown", "OG1", 0.5, (LINE,), f"--key {SECRET}"),),
    plan=(
        Patch(
            "max_model_len",
            2,
            1,
            Effect.REDUCES_CAPACITY,
            f"--password {SECRET}",
            as_flag=f"--api-key {SECRET}",
        ),
    ),
    unknown=(f"REDISCLI_AUTH={SECRET}",),
)
RECORDS = (
    LINE,
    LADEN,
    Diagnosis(
        f"--db-pass={SECRET}",
        (LADEN,),
        (f"PGPASSWORD={SECRET}",),
        (EngineStart(1, settings=LADEN.settings),),
    ),
    Attempt(1, {"api_key": SECRET}, LADEN.plan, LADEN, error=f"redis://:{SECRET}@host"),
    *LADEN.facts.values(),
    *LADEN.settings.values(),
    *LADEN.causes,
    *LADEN.plan,
    compared.Row(
        "api_key", "setting", compared.ComparedValue(SECRET), compared.ComparedValue(None)
    ),
)


@each("record", RECORDS)
def test_no_text_of_a_record_shows_a_secret(record):
    texts = (
        repr(record),
        str(record),
        f"{record}",
        repr([record]),
        pprint.pformat({"a": record}),
        f"{record!r:s}",
    )

    assert all("Hunter2" not in text for text in texts)


def test_no_report_of_a_record_shows_a_secret():
    diagnosis = RECORDS[2]
    texts = (
        to_html(diagnosis),
        to_markdown(diagnosis),
        to_json(LADEN_DIAGNOSIS),
        note(LADEN),
        diagnosis._repr_html_(),
    )

    assert all("Hunter2" not in text for text in texts)


LADEN_DIAGNOSIS = Diagnosis("log", (LADEN,))  # JSON holds the source as it was given


def test_evidence_as_text_has_no_escape_for_a_terminal():
    assert "\x1b" not in str(LINE)


def test_a_record_reads_as_python_writes_it():
    assert repr(Evidence("out of memory", 3)) == "Evidence(text='out of memory', line=3)"
    assert eval(repr(Fact("model", "m", line=2)), {"Fact": Fact}) == Fact("model", "m", line=2)


def test_inside_unmasked_a_record_shows_what_it_holds():
    with unmasked():
        assert SECRET in repr(LADEN)
        assert SECRET in str(LINE)


def test_the_record_itself_keeps_what_it_holds():
    repr(LADEN)
    assert LADEN.settings["api_key"].value == SECRET


def test_every_public_record_and_what_it_holds_is_one():
    public = [getattr(oomguard, name) for name in oomguard.__all__]
    classes = {kind for kind in public if isinstance(kind, type) and is_dataclass(kind)}
    for module in (incident, facts, compared):
        classes |= {
            kind for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)
        }
    plain = {
        "Policy",
        "FactSpec",
        "Size",
        "Guard",
        "Explanation",
        "RuleSet",
    }  # they hold numbers and oomguard's own words

    assert {kind.__name__ for kind in classes if not issubclass(kind, Record)} <= plain


def test_showing_a_record_is_all_that_loads_the_masks():
    code = "import oomguard, sys; oomguard.Incident; print([n for n in sys.modules if n.startswith('oomguard.report')])"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "[]\n"
