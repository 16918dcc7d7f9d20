"""What users install: the wheel, built and run where the source tree cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        str(ROOT),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = out.glob("*.whl")
    return path


def test_every_rule_file_is_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT / "rules") for path in (ROOT / "rules").rglob("*.toml")}
    assert files
    assert {f"oomguard/rules/shipped/{path}" for path in files} <= names
    assert {"oomguard/py.typed", "oomguard/testing/wordings.toml"} <= names


def test_no_test_example_or_log_is_inside(wheel):
    assert {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} <= {
        "oomguard",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }


def test_the_entry_points_are_declared(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    text = archive.read(name).decode()
    assert "oomguard = oomguard.engines.vllm.plugin:register" in text
    assert "oomguard = oomguard.__main__:main" in text
    assert "oomguard = oomguard.testing.pytest_plugin" in text.split("[pytest11]")[1]


def test_the_installed_wheel_diagnoses_with_its_own_rules(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    log = tmp_path / "error.log"
    log.write_text(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when\n"
    )
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path / 'site')!r}] + [p for p in sys.path if p != {str(ROOT)!r}];"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__.lower()];"
        "import oomguard; print(oomguard.__file__, file=sys.stderr);"
        f"from oomguard.cli import main; main(['diagnose', '--format', 'json', {str(log)!r}])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert str(tmp_path / "site") in ran.stderr
    assert json.loads(ran.stdout)["incidents"][0]["kind"] == "kv_cache_none_left"
