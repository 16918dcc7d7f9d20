"""A stranger's model folder is input: none of its Python runs, in our process or in one that we start.

Only what Python itself takes from a folder before our first line is out of reach: it is measured beside each case.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.core import process
from support.each import each

ROOT = Path(__file__).parents[2]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
}
CALL = (
    "--engine",
    "transformers",
    "--batch-size",
    "2",
    "--prompt-tokens",
    "16",
    "--max-new-tokens",
    "4",
)
COMMANDS = {
    "trace": ("plan", ".", "--gpu-memory", "24GiB", *CALL, "--trace"),
    "jobs": ("diagnose", "--jobs", "2", "one.log", "two.log"),
}
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
# The path that the user set; {} stands for absolute folders. As a script oomguard is found without it.
CASES = [
    pytest.param("script", "", "trace", marks=NEEDS_TRANSFORMERS),
    ("script", ":", "jobs"),
    ("-m", ".:{}", "jobs"),
]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder beside the stranger's: the command as installers write it, and a module and a script that do nothing."""
    folder = tmp_path / "elsewhere"
    (folder / "nothing").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        (folder / "nothing" / name).touch()
    (folder / "nothing.py").touch()
    finds = f"import sys\nsys.path.insert(1, {str(ROOT)!r})\n"
    (folder / "oomguard").write_text(
        f"{finds}from oomguard.__main__ import main\nsys.exit(main())\n"
    )
    return folder


def run(
    stranger, elsewhere: Path, way: str, pythonpath: str, *arguments: str, stdin: str = ""
) -> int:
    """Run oomguard in the stranger's folder and return its process's number; it must succeed."""
    (stranger.folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("one.log", "two.log"):
        (stranger.folder / name).write_text(OOM)
    command = ["-m", "oomguard"] if way == "-m" else [str(elsewhere / "oomguard")]
    with subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=stranger.folder,
        env=variables(elsewhere, pythonpath),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        out, err = process.communicate(stdin, timeout=300)
    assert process.returncode == 0, err
    assert out
    return process.pid


def variables(elsewhere: Path, pythonpath: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": pythonpath.format(f"{ROOT}{os.pathsep}{elsewhere}")}


def of_python_itself(stranger, elsewhere: Path, way: str, pythonpath: str) -> set[str]:
    """What Python runs of that folder where the program does nothing at all."""
    command = ["-m", "nothing"] if way == "-m" else [str(elsewhere / "nothing.py")]
    env = variables(elsewhere, pythonpath)
    subprocess.run([sys.executable, *command], cwd=stranger.folder, env=env, check=True, timeout=60)
    return set(stranger.ran())


@pytest.mark.parametrize(("way", "pythonpath", "name"), CASES)
def test_no_module_of_the_working_directory_runs(way, pythonpath, name, stranger, elsewhere):
    before_us = of_python_itself(stranger, elsewhere, way, pythonpath)
    if way == "-m":
        (stranger.folder / "oomguard.py").unlink()  # Python takes it for the program itself
    pid = run(stranger, elsewhere, way, pythonpath, *COMMANDS[name])
    ran = stranger.ran()
    assert set(ran) <= before_us
    assert set().union(*ran.values()) <= {pid}  # none of it in a process of ours
    assert way == "-m" or pythonpath or not ran


def test_notebook_start_takes_nothing_from_its_folder(stranger, elsewhere):
    """There the working directory comes first in the user's own process, which is the user's to answer for."""
    notebook = elsewhere / "oomguard"
    notebook.write_text(
        f"import sys\nsys.path[:1] = ['', {str(ROOT)!r}]\nfrom oomguard.cli import main\nmain()\n"
    )
    (stranger.folder / "oomguard.py").unlink()
    pid = run(stranger, elsewhere, "script", "", *COMMANDS["jobs"])
    ran = stranger.ran()
    assert "json" in ran
    assert set().union(*ran.values()) == {pid}


def test_a_checkout_runs_itself_and_nothing_else_of_its_folder(stranger, elsewhere):
    pythonpath = "."
    (stranger.folder / "oomguard.py").unlink()
    before_us = of_python_itself(
        stranger, elsewhere, "-m", f"{pythonpath}:{{}}" if pythonpath else "{}"
    )
    shutil.copytree(
        ROOT / "oomguard",
        stranger.folder / "oomguard",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (stranger.folder / "rules").symlink_to(ROOT / "rules")
    stranger.plant("it", "it.py")
    init = stranger.folder / "oomguard" / "__init__.py"
    note = (
        (stranger.folder / "it.py").read_text().split("before")[0]
    )  # the checkout itself tells that it runs
    init.write_text(init.read_text() + note)
    pid = run(stranger, elsewhere, "-m", pythonpath, *COMMANDS["jobs"])
    ran = stranger.ran()
    workers = ran.pop("it") - {pid}
    assert len(workers) == 2
    assert set(ran) <= before_us
    assert set().union(*ran.values()) <= {pid}


@pytest.mark.parametrize(("way", "pythonpath"), [("-m", ":{}:")])
def test_the_users_own_command_keeps_its_path_and_its_variables(
    way, pythonpath, stranger, elsewhere
):
    tell = "import mine, json, os, sys; json.dump([sys.path, dict(os.environ)], open('told.json', 'w')); print('told')"
    for path in stranger.folder.glob("*.py"):
        path.unlink()
    (stranger.folder / "mine.py").touch()
    env = variables(elsewhere, pythonpath)
    subprocess.run(
        [sys.executable, "-c", tell], cwd=stranger.folder, env=env, check=True, timeout=60
    )
    alone = json.loads((stranger.folder / "told.json").read_text())
    run(stranger, elsewhere, way, pythonpath, "run", "--", sys.executable, "-c", tell)
    under_us = json.loads((stranger.folder / "told.json").read_text())
    assert under_us[0] == alone[0]
    assert under_us[1].pop("OOMGUARD_OUTER_RUN").isdigit()
    own = {
        name for name in under_us[1] if name.startswith("OOMGUARD_VLLM_")
    }  # they ask the plugin for a report, if it is there
    assert {name: value for name, value in under_us[1].items() if name not in own} == alone[1]


@each(
    ("given", "kept"),
    [
        (None, None),
        ("", None),
        (":", None),
        (".", None),
        ("lib", None),
        ("~/lib", None),
        ("/a::/b", "/a:/b"),
        (":/a:.", "/a"),
        ("/a", "/a"),
    ],
)
@each("name", ["PYTHONPATH", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX"])
def test_only_absolute_folders_of_code_reach_a_python_of_ours(name, given, kept, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    before = dict(os.environ)
    found = process.python_environment()
    assert found.get(name) == kept
    assert found["PYTHONSAFEPATH"] == "1"
    assert dict(os.environ) == before


def test_a_folder_that_the_user_named_in_full_stays(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:lib:.")
    monkeypatch.setattr(
        sys, "path", ["/bin", str(tmp_path), str(tmp_path / "lib"), "", "lib", "/usr/lib"]
    )
    process.leave_working_directory()
    assert sys.path == ["/bin", str(tmp_path), "/usr/lib"]


def test_a_working_directory_that_was_removed_is_no_failure(tmp_path, elsewhere):
    folder = tmp_path / "gone"
    gone = f"cd {folder} && rmdir {folder} && exec '{sys.executable}' -m oomguard --version"
    folder.mkdir()
    ran = subprocess.run(
        ["sh", "-c", gone],
        env=variables(elsewhere, "{}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("oomguard ")


def test_flags_that_shut_the_environment_out_go_on(elsewhere):
    source = "import sys; sys.path.insert(0, sys.argv[1]); from oomguard.core import process; print(process.python_command('m')[1:4])"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", source, str(ROOT)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "['-P', '-E', '-s']"
