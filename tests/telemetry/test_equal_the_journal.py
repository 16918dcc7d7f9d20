"""What is counted of a run is what its journal holds."""

from __future__ import annotations

import sys

import pytest

from support.counted import BROKEN, counted, records, run, scraped

HEALTHY = ("true",)
DIES = (sys.executable, "-c", "raise SystemExit(7)")
STUBBORN = (*BROKEN, "--fits", "100", "--estimate", "1792")
KILLED = ("sh", "-c", "kill -9 $$")


@pytest.mark.parametrize(
    ("options", "command", "attempts"),
    [
        pytest.param((), HEALTHY, 1, id="healthy"),
        pytest.param((), DIES, 1, id="fails-of-something-else"),
        pytest.param((), KILLED, 1, id="killed"),
        pytest.param((), BROKEN, 2, id="fails-then-fits"),
        pytest.param(("--max-attempts", "3"), STUBBORN, None, id="never-fits"),
        pytest.param(("--pin", "max_model_len"), BROKEN, 1, id="nothing-may-be-changed"),
        pytest.param(("--dry-run",), BROKEN, 1, id="dry-run"),
    ],
)
def test_each_counter_equals_what_the_journal_comes_to(options, command, attempts, tmp_path):
    journal, file = tmp_path / "journal.sqlite3", tmp_path / "run.prom"
    run("--journal", str(journal), "--metrics", str(file), *options, command=command)

    kept, found = records(journal), scraped(file.read_text())
    assert attempts is None or len(kept) == attempts
    counters = {key: value for key, value in found.items() if key[0].endswith("_total")}
    seconds = counters.pop(("oomguard_failed_attempts_seconds_total",))
    assert counters == counted(kept)
    failed = [one for one in kept if one.incident is not None or one.exit_status]
    # both are the attempt's own seconds; the journal adds them to the hour it began, which keeps a millionth of a second
    assert seconds == pytest.approx(
        sum((one.ended_at or 0) - one.started_at for one in failed), abs=1e-4
    )
    assert (seconds > 0) == bool(failed)
