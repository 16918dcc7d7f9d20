"""What is no log: an archive or a cut-off file named as a snapshot is refused, another pickle in a folder is passed over."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from oomguard.core.errors import InputError
from oomguard.diagnosis import PASSED_OVER, diagnose, diagnose_stream
from oomguard.scan.inputs import NON_LOG_HEAD_BYTES, is_other_pickle
from support.hostile_pickles import hostile_pickles
from support.made_snapshots import example

LOG = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
SNAPSHOT = pickle.dumps(example().in_pieces())


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return file.getvalue()


def tarred(name: str, content: bytes, folder: str = "") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if folder:
            about = tarfile.TarInfo(folder)
            about.type = tarfile.DIRTYPE
            archive.addfile(about)
        about = tarfile.TarInfo(name)
        about.size = len(content)
        archive.addfile(about, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("snapshot.pickle", b"", "is empty: the snapshot is truncated"),
        ("snapshot.PKL", b"\x80", "has one byte"),
        ("snapshot.pickle.gz", gzip.compress(b""), "is empty"),
        ("snapshot.pickle", zipped(SNAPSHOT), "is a zip archive from torch.save"),
        ("weights.pt", zipped(b""), "is a zip archive"),
        (
            "jobs.tgz",
            gzip.compress(tarred("s.pickle", SNAPSHOT)),
            r"tar archive with s\.pickle",
        ),
        (
            "jobs.tar",
            tarred("jobs/any", SNAPSHOT, folder="jobs"),
            "tar archive with jobs/any",
        ),
        ("jobs.tar", tarred("é" * 120 + ".pickle", SNAPSHOT), "tar archive with"),
    ],
    # Archives hold the moment that they were made at: as names of tests they would differ between workers.
    ids=["nothing", "one byte", "nothing packed", "zip", "weights", "tgz", "tar", "long name"],
)
def test_false_snapshot_names_are_unreadable(
    tmp_path: Path, name: str, content: bytes, reason: str
):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as told:
        diagnose(path)
    assert told.value.hint
    assert diagnose_stream(io.BytesIO(b""), "empty.log").verdict == "no_oom"


def test_logs_are_read_whatever_they_are_called(tmp_path: Path):
    for name, content in (
        ("a.pickle", LOG),
        ("a.pt", LOG),
        ("a.tgz", gzip.compress(tarred("error.log", LOG))),
        ("b.tar", tarred("logs/error.log", LOG, folder="logs")),
    ):
        (tmp_path / name).write_bytes(content)
        assert diagnose(tmp_path / name).verdict == "oom", name


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_snapshot_is_told_from_other_pickles_by_how_it_begins(protocol: int):
    assert not is_other_pickle(
        pickle.dumps(example().in_pieces(), protocol=protocol)[:NON_LOG_HEAD_BYTES]
    )
    assert is_other_pickle(pickle.dumps({"text": "a", "segments": []}, protocol=protocol))
    assert is_other_pickle(pickle.dumps([1, {"a": 2}], protocol=protocol))
    assert not is_other_pickle(LOG)


def test_other_pickles_in_a_folder_are_passed_over_and_not_run(tmp_path: Path):
    folder = tmp_path / "logs"
    folder.mkdir()
    hostile = hostile_pickles(tmp_path / "marker")["REDUCE of os.system, protocol 5"]
    files = {
        "a.log": LOG,
        "hostile.pkl": pickle.dumps([0])[:-1] + hostile[2:],
        "old.pt": pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2),
        "results.pkl": pickle.dumps({"scores": [1, 2]}),
        "results.pkl.gz": gzip.compress(pickle.dumps({"scores": [1, 2]})),
        "s.pickle": SNAPSHOT,
        "weights.pt": zipped(b"weights"),
        "zero.pickle": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    command = [sys.executable, "-m", "oomguard", "diagnose", "--jobs", "2", str(folder)]
    plain, verbose, told = (
        subprocess.run([*command, *more], capture_output=True, check=False)
        for more in ([], ["-v"], ["--format=json"])
    )
    assert (plain.returncode, plain.stderr, told.returncode) == (0, b"", 0)
    assert PASSED_OVER.encode() not in plain.stdout
    assert PASSED_OVER.encode() in verbose.stdout
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [Path(line["source"]).name for line in lines if line["verdict"] == "oom"] == [
        "a.log",
        "s.pickle",
    ]
    assert len(lines) == len(files)
    assert not (tmp_path / "marker").exists()
    named = subprocess.run(
        [*command, str(folder / "results.pkl")], capture_output=True, check=False
    )
    assert named.returncode == 2


@pytest.mark.parametrize(
    "content",
    [
        b"I" + b"9" * 2_000_000 + b"\n.",
        b"Pfoo\n.",
        b"S'text'\n.",
        pickle.dumps(7, 0),
        pickle.dumps("x" * 99, 0),
    ],
)
def test_protocol_0_pickle_named_as_a_snapshot_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(InputError, match="protocol 0"):
        diagnose(path)


@pytest.mark.parametrize(
    "content",
    [LOG, b".\n" + LOG, b"Processing\n" + LOG, b"INFO 1\n" + LOG, LOG.decode().encode("utf-16")],
)
def test_a_log_that_is_named_as_a_pickle_is_read(content: bytes, tmp_path: Path):
    path = tmp_path / "job.pickle"
    path.write_bytes(content)
    assert diagnose(path).incidents


FOREIGN = {
    "first byte zeroed": (
        b"\0" + SNAPSHOT[1:],
        "is not a pickle and may be damaged: it begins with 00 ",
    ),
    "zeros": (bytes(5000), "is not a pickle and may be damaged: it begins with 00 00 00 00"),
    "other bytes": (
        bytes(range(250, 0, -1)) * 9 + SNAPSHOT[500:],
        "is not a pickle and may be damaged: it begins with fa",
    ),
    "page": (
        b"\n<!DOCTYPE html><html><body>404 not found</body></html>",
        r"is a web page \(HTML\)",
    ),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1234\n",
        "is a pointer of Git LFS",
    ),
    "text": (b"1 2 3\n", "is a text without a memory failure, not an allocation snapshot"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("suffix", ["pickle", "pkl", "pickle.gz"])
def test_damaged_pickle_names_are_unreadable(name: str, suffix: str, tmp_path: Path):
    content, reason = FOREIGN[name]
    path = tmp_path / f"s.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(InputError, match=reason) as told:
        diagnose(path)
    assert told.value.hint


def test_pickle_names_in_a_folder_are_not_separate_lines(tmp_path: Path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.log").write_bytes(LOG)
    (folder / "results.pkl").write_bytes(pickle.dumps({"scores": [1, 2]}))
    for name, (content, _reason) in FOREIGN.items():
        if name != "text":
            (folder / f"{name}.pickle").write_bytes(content)
    command = [sys.executable, "-m", "oomguard", "diagnose", str(folder)]
    plain = subprocess.run(command, capture_output=True, check=False, text=True)
    verbose = subprocess.run([*command, "-v"], capture_output=True, check=False, text=True)

    assert (plain.returncode, plain.stderr) == (0, "")
    assert "no memory failure found" not in plain.stdout
    assert ".pickle" not in plain.stdout
    assert verbose.stdout.count(PASSED_OVER) == len(FOREIGN)
