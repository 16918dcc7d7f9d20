"""``diagnose --summary``, ``--since`` and ``--engine``: what comes out of many inputs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomguard.cli import main
from oomguard.core.installation import install_hint
from support.each import each

ROOT = Path(__file__).parents[2]
KV_CACHE = ROOT / "examples" / "logs" / "vllm_serve_kv_cache.log"
TOO_LOW = ROOT / "examples" / "logs" / "vllm_script_utilization_too_low.log"
UID = "0b5cf621-1f52-4d3c-9b8f-2f6e0f1c9a11"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    folder = tmp_path / "fleet"
    for i in range(3):
        pod = folder / "pods" / f"prod_llm-{i}_{UID}" / "engine"
        pod.mkdir(parents=True)
        shutil.copyfile(KV_CACHE, pod / "0.log")
        shutil.copyfile(TOO_LOW, folder / f"slurm-7_{i}.out")
    (folder / "healthy.log").write_text("INFO: all is well\n")
    return folder


def run(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == code


def test_a_summary_is_one_object_with_groups_the_largest_first(
    fleet: Path, capsys: pytest.CaptureFixture[str]
):
    run("diagnose", "--summary", "--format", "json", fleet / "pods", fleet)
    told = json.loads(capsys.readouterr().out)
    assert (told["inputs"], told["inputs_with_oom"], told["incidents"]) == (7, 6, 6)
    assert [group["cause"] for group in told["groups"]] == [
        "max_model_len_too_large",
        "utilization_too_low",
    ]
    first = told["groups"][0]
    assert first["fix"]["changes"][0]["as_flag"] == "--max-model-len 1792"
    assert first["fix"]["fixes"] == 3
    assert [row["who"] for row in first["writers"]] == [
        f"pod prod/llm-{i} container engine" for i in range(3)
    ]
    assert first["first_seen"] <= first["last_seen"]
    assert told["best"] == 0


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_summary_is_the_same_however_many_processes_read(
    fleet: Path, jobs: str, capsys: pytest.CaptureFixture[str]
):
    run("diagnose", "--summary", "--format", "json", "--jobs", jobs, fleet / "pods", fleet)
    told = capsys.readouterr().out
    run("diagnose", "--summary", "--format", "json", fleet / "pods", fleet)
    assert capsys.readouterr().out == told


def test_the_terminal_names_cause_patch_and_who(fleet: Path, capsys: pytest.CaptureFixture[str]):
    run("diagnose", "--summary", fleet / "pods", fleet)
    told = capsys.readouterr().out
    assert "6 of 7 inputs ran out of memory: 6 incidents in 2 groups" in told
    assert "--max-model-len 1792" in told
    assert "pod prod/llm-0 container engine" in told
    assert "would have fixed most: --max-model-len 1792 of ./tiny (3 of 6 incidents)" in told
    assert all(line == line.rstrip() for line in told.splitlines())


def test_a_page_is_refused_before_anything_is_read_or_written(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    for asked in (["--output", page], ["--format", "html"]):
        run("diagnose", "--summary", *asked, fleet, code=2)
        shown = capsys.readouterr()
        assert "use terminal, json or md: oomguard diagnose --summary --format md" in shown.err
        assert not shown.out
    assert not page.exists()


def test_file_with_several_paths_counts_once(fleet: Path, capsys: pytest.CaptureFixture[str]):
    log = fleet / f"pods/prod_llm-0_{UID}/engine/0.log"
    (fleet / "containers").mkdir()
    (fleet / "containers" / f"llm-0_prod_engine-{'c3' * 32}.log").symlink_to(log)
    (fleet / "loop").symlink_to(".")
    run("diagnose", "--summary", "--format", "json", fleet / "containers", log, fleet / "**/*.log")
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["inputs"], told["incidents"]) == (4, 3)
    assert "oomguard: 3 paths led to files that are already read under another name\n" in shown.err


@pytest.mark.parametrize("options", [["--summary"], []])
def test_file_of_an_unknown_format_is_refused(
    fleet: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
):
    run("diagnose", *options, "--output", tmp_path / "x.csv", fleet, code=2)
    told = capsys.readouterr().err
    assert "oomguard has no output format .csv" in told
    assert ".json, .md, .html or .txt" in told
    assert not (tmp_path / "x.csv").exists()
    for name in ("x", "x.txt", "x.2026"):
        run("diagnose", *options, "--output", tmp_path / name, fleet / "healthy.log")


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (["--min", "max_model_len=4096"], "below your floor of 4096"),
        (["--pin", "max_model_len"], "pinned"),
        (
            ["--allow", "output-preserving"],
            "--allow output-preserving does not permit reduces-capacity",
        ),
    ],
)
def test_forbidden_patch_counts_as_no_fix_and_has_the_reason(
    fleet: Path, policy: list[str], why: str, capsys: pytest.CaptureFixture[str]
):
    log = fleet / "higher.log"
    log.write_text(
        KV_CACHE.read_text().replace("maximum model length is 1792", "maximum model length is 8192")
    )
    run("diagnose", "--summary", "--format", "json", *policy, fleet / "pods", log)
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    is_floor = policy[0] == "--min"
    assert group["refused"] == [
        {"setting": "max_model_len", "why": why, "incidents": 3 if is_floor else 4}
    ]
    assert (group["fix"] or {}).get("fixes") == (1 if is_floor else None)

    run("diagnose", "--summary", *policy, fleet / "pods")
    told = capsys.readouterr().out
    assert "no change that you permit" in told
    assert f"max_model_len for 3: {why}" in told
    assert "would have fixed most" not in told


def test_what_was_last_written_before_is_left_out_and_told(
    fleet: Path, capsys: pytest.CaptureFixture[str]
):
    old = time.time() - 3 * 86400
    os.utime(fleet / "slurm-7_0.out", (old, old))
    run("diagnose", "--since", "24h", "--format", "json", fleet)
    shown = capsys.readouterr()
    assert [Path(json.loads(line)["source"]).name for line in shown.out.splitlines()] == [
        "healthy.log",
        "slurm-7_1.out",
        "slurm-7_2.out",
        "0.log",
        "0.log",
        "0.log",
    ]
    assert "1 input was last written before --since" in shown.err


def test_a_summary_leaves_out_incidents_printed_before(
    fleet: Path, capsys: pytest.CaptureFixture[str]
):
    run("diagnose", "--summary", "--since", "2099-01-01", "-q", "--format", "json", fleet)
    told = json.loads(capsys.readouterr().out)
    assert (told["incidents"], told["inputs_left_out"]) == (0, 7)


@each("form", ["json", "export"])
def test_time_is_journalds_if_the_lines_came_through_it(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
):
    lines = [
        "Traceback (most recent call last):",
        '  File "/app/gen.py", line 88, in <module>',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.25 GiB is free.",
    ]
    entries = [
        {
            "__CURSOR": f"s=1;i={i}",
            "__REALTIME_TIMESTAMP": str(1795598092000000 + i),
            "_PID": "7",
            "MESSAGE": line,
        }
        for i, line in enumerate(lines)
    ]
    texts = {
        "json": "".join(f"{json.dumps(entry)}\n" for entry in entries),
        "export": "\n".join(
            "".join(f"{key}={value}\n" for key, value in entry.items()) for entry in entries
        ),
    }
    (tmp_path / "x.log").write_text(texts[form])
    run("diagnose", "--summary", "--format", "json", tmp_path / "x.log")
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert (group["first_seen"], group["example"]["clock"]) == ("2026-11-25T09:14:52+00:00", "line")


@pytest.mark.parametrize("since", ["7", "yesterday", "-3d", "2026-13-01"])
def test_a_moment_that_is_none_is_a_usage_error(
    fleet: Path, since: str, capsys: pytest.CaptureFixture[str]
):
    run("diagnose", "--since", since, fleet, code=2)
    assert "is not an age or a date" in capsys.readouterr().err


def test_exit_code_tells_whether_any_input_ran_out_of_memory(fleet: Path):
    run("diagnose", "--summary", "--exit-code", fleet, code=1)
    run("diagnose", "--summary", "--exit-code", fleet / "healthy.log")


def test_an_input_that_cannot_be_read_is_counted_and_told(
    fleet: Path, capsys: pytest.CaptureFixture[str]
):
    run(
        "diagnose",
        "--summary",
        "--format",
        "json",
        fleet / "slurm-7_0.out",
        fleet / "none.log",
        code=2,
    )
    shown = capsys.readouterr()
    assert json.loads(shown.out)["inputs_unread"] == 1
    assert "none.log" in shown.err


def test_the_rank_of_a_line_that_srun_labelled_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "slurm-950.out-20261120"
    log.write_text("".join(f"3: {line}\n" for line in KV_CACHE.read_text().splitlines()))
    run("diagnose", "--summary", "--format", "json", log)
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["writers"][0]["who"] == "job 950 rank 3"


@pytest.mark.parametrize("missing", ["none-*.log", "none://bucket/x.log"])
def test_a_path_that_leads_to_no_input_is_counted_and_told(
    fleet: Path, missing: str, capsys: pytest.CaptureFixture[str]
):
    path = missing if "://" in missing else fleet / missing
    run("diagnose", "--summary", "--format", "json", fleet / "slurm-7_0.out", path, code=2)
    told = json.loads(capsys.readouterr().out)
    assert (told["inputs"], told["inputs_unread"]) == (1, 1)


@pytest.mark.parametrize("form", ["terminal", "markdown"])
def test_quiet_a_summary_without_incidents_says_nothing(
    fleet: Path, form: str, capsys: pytest.CaptureFixture[str]
):
    run("diagnose", "-q", "--summary", "--format", form, fleet / "healthy.log")
    assert capsys.readouterr().out == ""


def test_half_written_packed_log_counts_its_readable_part(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import gzip

    packed = gzip.compress(TOO_LOW.read_bytes() + b"x\n" * 40_000)
    (tmp_path / "cut.log.gz").write_bytes(packed[:-9])
    run("diagnose", "--summary", "--format", "json", tmp_path / "cut.log.gz", code=2)
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["inputs"], told["incidents"], told["inputs_unread"]) == (1, 1, 0)
    assert "ends early" in shown.err


@pytest.mark.parametrize("option", [["--summary"], ["--on", "ray"]])
def test_what_is_followed_has_no_end_to_sum_up(
    fleet: Path, option: list[str], capsys: pytest.CaptureFixture[str]
):
    run("diagnose", "--follow", *option, fleet / "healthy.log", code=2)
    assert "--follow does not work with" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(fleet: Path, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['ray'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    command = [sys.executable, "-m", "oomguard", "diagnose", "--on", "ray", str(fleet)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert ran.returncode == 2
    assert install_hint("ray") in ran.stderr
    assert "Traceback" not in ran.stderr


def test_reading_local_files_loads_nothing_for_clusters(fleet: Path):
    code = (
        "import atexit, sys; from oomguard.cli import main;"
        "atexit.register(lambda: print(sorted({'ray', 'fsspec', 'pandas', 'pyarrow'} & set(sys.modules)), file=sys.stderr));"
        "main(['diagnose', '-q', sys.argv[1]])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(fleet)], capture_output=True, text=True, check=True
    )
    assert ran.stderr.splitlines()[-1] == "[]"
