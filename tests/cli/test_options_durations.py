"""Times as the user writes them: one form for every option that takes one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.cli.options import seconds_of
from support.each import each
from support.in_process import oomguard_text

OLD = Path(__file__).parents[1] / "journal" / "schema_1.sqlite3"


@each(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0", 0),
        ("0.5", 0.5),
        ("1e3", 1000),
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("1d2h", 93600),
        ("2W", 1209600),
        (" 1.5h ", 5400),
    ],
)
def test_a_time_has_units_or_is_in_seconds(text, seconds):
    assert seconds_of(text) == seconds


@each("text", ["", "soon", "-1", "nan", "inf", "1h30", "h", "1x", "1 h", "٣"])
def test_anything_else_is_no_time(text):
    assert seconds_of(text) is None


def test_every_time_option_of_run_has_the_same_format():
    option = "--deadline"
    for text, status in (("1h30m", 0), ("soon", 2)):
        ran = subprocess.run(
            [sys.executable, "-m", "oomguard", "run", option, text, "--", "true"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == status, (text, ran.stderr)
        assert ("is not a time such as 30m, 1h30m or 90 (seconds)" in ran.stderr) == bool(status)


@pytest.mark.parametrize(
    ("age", "status"),
    [("1d2h", 0), ("2026-01-02", 0), ("7", 2)],
)
def test_a_moment_is_a_date_or_an_age_with_a_unit(age, status):
    ran = oomguard_text("history", "--since", age, "--journal", OLD)
    assert (ran.returncode, "is not an age or a date" in ran.stderr) == (status, bool(status))
