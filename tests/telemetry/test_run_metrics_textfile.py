"""The file of a textfile collector: whole at any time, and a disk that does not take it is told once."""

from __future__ import annotations

import threading
from pathlib import Path

from oomguard.core.incident import Attempt
from oomguard.telemetry.metrics import Exporter, Tally
from oomguard.telemetry.run_metrics import RunMetrics, TextFile
from support.counted import scraped


def file_of(tally: Tally, path: Path) -> TextFile:
    return TextFile(path, Exporter(tally, {"run"}))


def test_each_event_is_in_the_file_at_once_without_leftovers(tmp_path):
    path, tally = tmp_path / "run.prom", Tally()
    counting = RunMetrics(tally, lambda: False)
    counting.outlet = file_of(tally, path)

    counting.began(1, None, 7)
    assert ("oomguard_attempt_start_time_seconds",) in scraped(path.read_text())
    counting.ended(Attempt(1, {}, exit_status=3, error="exit status 3", seconds=2.5))
    found = scraped(path.read_text())
    assert found[("oomguard_failed_attempts_seconds_total",)] == 2.5
    assert ("oomguard_attempt_start_time_seconds",) not in found
    assert list(tmp_path.iterdir()) == [path]


def test_who_reads_while_it_is_written_sees_a_whole_file(tmp_path):
    path, tally = tmp_path / "run.prom", Tally()
    writer = file_of(tally, path)
    writer.update()
    whole, done = path.read_text().count("\n"), threading.Event()

    def write() -> None:
        for _ in range(200):
            writer.update()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text().count("\n"))
    thread.join()
    assert seen == {whole}


def test_unwritable_file_is_reported_once_per_change(tmp_path, caplog):
    folder, tally = tmp_path / "there", Tally()
    folder.mkdir()
    writer = file_of(tally, folder / "run.prom")
    for is_there in (False, False, True, False):
        if is_there:
            folder.mkdir()
        elif folder.exists():
            (folder / "run.prom").unlink(missing_ok=True)
            folder.rmdir()
        writer.update()
    assert caplog.text.count("Could not write the metrics") == 2
    assert "No such file or directory" in caplog.text
