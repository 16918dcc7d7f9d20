"""What tests and the benchmark of live figures share: a run, its metrics as they are scraped, and
what its journal comes to.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from oomguard.journal.codec import AttemptRow
from oomguard.journal.store import Journal
from support.commands import ROOT

ENGINE = ROOT / "tests" / "analyst" / "fake_engine.py"
# A command that fails as vLLM does, and fits once its length is lowered.
BROKEN = (sys.executable, str(ENGINE))


def run(
    *options: str, command: tuple[str, ...] = BROKEN, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command under oomguard to its end."""
    words = [sys.executable, "-m", "oomguard", "run", *options, "--", *command]
    given = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, env={**given, **env}
    )


def scraped(text: str) -> dict[tuple[str, ...], float]:
    """Return the values of an exposition by name and label values, these in the order of their
    names.
    """
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for sample in samples
    }


def counted(records: list[AttemptRow]) -> dict[tuple[str, ...], float]:
    """Return the counters that a journal's records come to."""
    found: Counter[tuple[str, ...]] = Counter()
    for record in records:
        found[("oomguard_attempts_total",)] += 1
        found[("oomguard_relaunches_total",)] += record.number > 1
        found[("oomguard_failed_attempts_total",)] += (
            record.incident is not None or record.exit_status != 0
        )
        for figure, counter in (
            ("survived_steps", "oomguard_survived_steps_total"),
            ("requests_without_room", "oomguard_oversized_requests_total"),
        ):
            found[(counter,)] += (record.measured or {}).get(figure, 0)
        for patch in record.patches:
            found["oomguard_patches_total", patch["effect"], patch["setting"]] += 1
        if record.incident is not None:
            causes = record.incident["causes"]
            found[
                "oomguard_incidents_total",
                causes[0]["id"] if causes else "unknown",
                record.incident["kind"],
            ] += 1
    return dict(found)


def records(journal: Path) -> list[AttemptRow]:
    """Return what a journal holds."""
    return Journal(journal).records()
