"""Objects of a store that answers as S3 does, read by the command in a process of its own: s3fs keeps a thread."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomguard.core.installation import install_hint
from support.object_store import object_store

ROOT = Path(__file__).parents[2]
LOG = (ROOT / "examples" / "logs" / "vllm_serve_kv_cache.log").read_bytes()
UID = "0b5cf621-1f52-4d3c-9b8f-2f6e0f1c9a11"
OBJECTS = {
    "fleet/jobs/slurm-7_1.out": LOG,
    "fleet/jobs/slurm-7_2.out.gz": gzip.compress(LOG),
    "fleet/jobs/cut.gz": gzip.compress(LOG)[:-400],
    "fleet/jobs/deeper/x.log": LOG,
    f"fleet/pods/prod_llm_{UID}/engine/0.log": LOG,
    "fleet/healthy.log": b"INFO: all is well\n",
}


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    pytest.importorskip("s3fs")
    with object_store(OBJECTS) as address:
        yield address


def diagnose(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": address,
        "AWS_DEFAULT_REGION": "x",
    }
    command = [sys.executable, "-m", "oomguard", "diagnose", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )


def rows(ran: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_an_object_is_diagnosed_as_a_file_of_its_bytes(store: str, tmp_path: Path):
    (tmp_path / "x.log").write_bytes(LOG)
    (remote,) = rows(diagnose(store, "--format", "json", "s3://fleet/jobs/slurm-7_1.out"))
    (local,) = rows(diagnose(store, "--format", "json", str(tmp_path / "x.log")))
    assert remote.pop("source") == "s3://fleet/jobs/slurm-7_1.out"
    assert local.pop("source") == str(tmp_path / "x.log")
    assert remote == local


def test_bucket_folder_means_its_objects_packed_ones_too(store: str):
    ran = diagnose(store, "--format", "json", "s3://fleet/jobs")
    sources = [row["source"] for row in rows(ran)]
    assert sources == [
        f"s3://fleet/jobs/{name}" for name in ("cut.gz", "slurm-7_1.out", "slurm-7_2.out.gz")
    ]
    assert [row["verdict"] for row in rows(ran)][1:] == ["oom", "oom"]


def test_half_written_object_is_read_and_reported(store: str):
    ran = diagnose(store, "--format", "json", "s3://fleet/jobs/cut.gz")
    assert len(rows(ran)) == 1
    assert ran.returncode == 2
    assert "the gzip data ends early" in ran.stderr


def test_a_pattern_matches_objects_of_any_depth(store: str):
    ran = diagnose(store, "--format", "json", "s3://fleet/**/*.log")
    assert len(rows(ran)) == 3


def test_a_summary_of_objects_names_pods_and_jobs(store: str):
    ran = diagnose(
        store, "--summary", "--format", "json", "s3://fleet/jobs/slurm*", "s3://fleet/pods"
    )
    (group,) = json.loads(ran.stdout)["groups"]
    assert {row["who"] for row in group["writers"]} == {
        "job 7_1",
        "job 7_2",
        "pod prod/llm container engine",
    }


def test_unreadable_object_is_one_error_and_the_rest_is_read(store: str):
    for url, told in [
        ("s3://closed/x.log", "s3://closed/x.log: no permission"),
        ("s3://fleet/none.log", "s3://fleet/none.log: there is no such object"),
        ("s3://fleet/none-*.log", "no object matches"),
        ("gopher://fleet/x.log", "gopher://fleet/x.log"),
    ]:
        ran = diagnose(store, "--format", "json", url, "s3://fleet/healthy.log")
        assert ran.returncode == 2, (url, told)
        assert told in ran.stderr, (url, told)
        assert "Traceback" not in ran.stderr, (url, told)
        assert [row["source"] for row in rows(ran)] == ["s3://fleet/healthy.log"], (url, told)


def test_missing_object_counts_as_unreadable_in_a_summary(store: str):
    ran = diagnose(
        store, "--summary", "--format", "json", "s3://fleet/healthy.log", "s3://fleet/none.log"
    )
    told = json.loads(ran.stdout)
    assert (ran.returncode, told["inputs"], told["inputs_unread"]) == (2, 1, 1)


def test_a_missing_package_is_named(store: str, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['fsspec'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    command = [sys.executable, "-m", "oomguard", "diagnose", "s3://fleet/healthy.log"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert install_hint("fleet") in ran.stderr
