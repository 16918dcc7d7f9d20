"""Options from files: the working directory's only restrict, the user's own say anything, and nothing there ends a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.cli.options import OPTIONS, Configuration, own_file, read_configuration
from oomguard.core.errors import UsageError
from support.each import each
from support.in_process import oomguard_text

# What a stranger's table might say of each option to get more than the user allowed, and what is said of it.
RAISING = {
    "allow": ("'changes-outputs'", "allows more"),
    "pin": ("'no_such_setting'", "unknown setting"),
    "min": ("'no_such_setting=1'", "unknown setting"),
    "max_attempts": ("1000000", "more than 4"),
    "max_per_hour": ("4", "more than 3"),
    "deadline": ("-1", "between 0 and"),
    "dry_run": ("'yes'", "true or false"),
    "idempotent": ("true", "only a flag"),
    "report": ("'/tmp/planted.json'", "only a flag"),
    "snapshot": ("'/tmp/planted.pickle'", "only a flag"),
    "journal": ("'/tmp/planted.sqlite3'", "only a flag"),
    "reuse": ("true", "only a flag"),
    "rules": ("['.']", "only a flag"),
    "set": ("'max_model_len=1'", "only a flag"),
    "gpu_memory": ("'1GiB'", "only a flag"),
    "metrics": ("'0.0.0.0:9400'", "only a flag"),
    "format": ("'exe'", "one of terminal, json, md"),
    "jobs": ("'1024'", "only a flag"),
    "follow": ("true", "only a flag"),
    "output": ("'/tmp/planted.txt'", "only a flag"),
    "no_mask": ("true", "only a flag"),
    "quiet": ("true", "only a flag"),
    "verbose": ("'yes'", "true or false"),
    "grace": ("0", "only a flag"),
    "input": ("'/etc/passwd'", "only a flag"),
    "pty": ("false", "only a flag"),
    "step_recovery": ("false", "only a flag"),
    "exit_code": ("true", "only a flag"),
    "color": ("'pink'", "one of auto, always, never"),
    "log_format": ("'xml'", "one of console, json"),
    "gpus": ("'auto'", "only a flag"),
    "wait": ("'1h'", "more than 0"),
    "lease": ("'job'", "only a flag"),
    "lease_folder": ("'/tmp/planted'", "only a flag"),
    "restart": ("'on-failure'", "must be no"),
    "hang_after": ("'1s'", "only a flag"),
    "host_reserve": ("'0'", "only a flag"),
    "termination_message": ("'/tmp/planted.txt'", "only a flag"),
    "probes": ("'8090'", "only a flag"),
    "exit_status": ("'by-cause'", "only a flag"),
    "slurm_comment": ("true", "only a flag"),
    "slurm_requeue": ("3", "only a flag"),
    "rank": ("1", "only a flag"),
    "world_size": ("2", "only a flag"),
    "rendezvous": ("'/tmp/planted'", "only a flag"),
    "rank_timeout": ("'1s'", "only a flag"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def read(project: Path, table: str, own: str = "") -> Configuration:
    (project / "pyproject.toml").write_text(f"[tool.oomguard]\n{table}\n")
    if own:
        own_file().parent.mkdir(parents=True, exist_ok=True)
        own_file().write_text(own)
    return read_configuration(project)


def left_out(configuration: Configuration) -> dict[str, str]:
    return {option: why for file in configuration.files for option, why in file.left_out}


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oomguard", "run", *options, "--", "echo", "hi"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=project
    )


def test_every_option_is_tried():
    assert set(RAISING) == set(OPTIONS)


@each("option", OPTIONS)
def test_raise_by_a_strangers_table_is_ignored_with_the_reason(project, option):
    value, why = RAISING[option]
    found = read(project, f"{option.replace('_', '-')} = {value}")

    assert found.options == {}
    assert why in left_out(found)[option]


def test_an_old_limit_of_relaunches_still_restricts(project):
    assert read(project, "max-relaunches = 0").options == {"max_attempts": 1}


@each("option", OPTIONS)
def test_no_option_of_a_stranger_s_table_ends_a_command(project, option):
    for value in (
        "{}",
        "[]",
        "''",
        "nan",
        "-inf",
        "1979-05-27",
        "[[1]]",
        "{ a = { b = 1 } }",
        "'\\u001b'",
        "true",
        "-1",
    ):
        found = read(project, f"{option} = {value}")
        assert found.options == {} or (value, option) in {("true", "dry_run"), ("true", "verbose")}


@each(
    ("table", "options"),
    [
        ("allow = 'output-preserving'", {"allow": "output-preserving"}),
        ("max_attempts = 1", {"max_attempts": 1}),
        ("max-attempts = 2", {"max_attempts": 2}),
        ("max-per-hour = 1", {"max_per_hour": 1}),
        ("max_per_hour = 0", {"max_per_hour": 0}),
        ("deadline = 60", {"deadline": 60}),
        ("deadline = '1h'", {"deadline": 3600}),
        ("restart = 'no'", {"restart": "no"}),
        ("dry-run = true", {"dry_run": True}),
        ("pin = 'dtype'", {"pinned": ["dtype"]}),
        ("pin = ['dtype', 'max-model-len']", {"pinned": ["dtype", "max_model_len"]}),
        ("min = { max_model_len = 8192 }", {"floors": ["max_model_len=8192"]}),
        ("min = ['max_model_len=8192']", {"floors": ["max_model_len=8192"]}),
        ("min = { max_model_len = '8K' }", {"floors": ["max_model_len=8K"]}),
        ("format = 'json'", {"form": "json"}),
        ("color = 'never'", {"color": "never"}),
        ("log_format = 'json'", {"log_format": "json"}),
        ("verbose = true", {"verbose": True}),
    ],
)
def test_what_a_table_restricts_or_how_it_looks_is_taken(project, table, options):
    found = read(project, table)

    assert (found.options, left_out(found)) == (options, {})


def test_wrong_entry_is_dropped_and_the_right_one_kept(project):
    found = read(
        project,
        "pin = ['dtype', 'nothing']\nmin = { max_model_len = 8192, dtype_ = 1, max_num_seqs = 'x' }",
    )

    assert found.options == {"pinned": ["dtype"], "floors": ["max_model_len=8192"]}
    assert len([row for file in found.files for row in file.left_out]) == 3


@each(
    ("own", "table", "options"),
    [
        ("allow = 'changes-outputs'", "", {"allow": "changes-outputs"}),
        ("allow = 'changes-outputs'", "allow = 'reduces-capacity'", {"allow": "reduces-capacity"}),
        (
            "allow = 'output-preserving'",
            "allow = 'reduces-capacity'",
            {"allow": "output-preserving"},
        ),
        ("max_attempts = 9", "max_attempts = 5", {"max_attempts": 5}),
        ("max_attempts = 1", "max_attempts = 2", {"max_attempts": 1}),
        ("max_per_hour = 9", "max_per_hour = 5", {"max_per_hour": 5}),
        ("max_per_hour = 1", "max_per_hour = 2", {"max_per_hour": 1}),
        ("max_per_hour = 9", "max_attempts = 2", {"max_per_hour": 9, "max_attempts": 2}),
        ("deadline = 100", "deadline = 200", {"deadline": 100}),
        ("deadline = 100", "deadline = 50", {"deadline": 50}),
        ("deadline = '2m'", "deadline = '100s'", {"deadline": 100}),
        ("deadline = '100s'", "deadline = '2m'", {"deadline": 100}),
        ("deadline = '100s'", "deadline = 99", {"deadline": 99}),
        ("wait = '1h'", "wait = '10m'", {"wait": 600}),
        ("wait = 600", "wait = '1h'", {"wait": 600}),
        ("restart = 'on-failure'", "restart = 'no'", {"restart": "no"}),
        ("hang_after = '10s'\ngrace = '1m'", "", {"hang_after": 10, "grace": 60}),
        ("gpus = 2\nlease = 'job'", "", {"gpus": "2", "lease": "job"}),
        ("slurm-comment = true", "", {"slurm_comment": True}),
        ("slurm_requeue = 2\nprobes = 8090", "", {"slurm_requeue": 2, "probes": "8090"}),
        ("dry_run = true", "dry_run = false", {"dry_run": True}),
        ("pin = 'dtype'", "pin = 'max_model_len'", {"pinned": ["dtype", "max_model_len"]}),
        (
            "min = { max_model_len = 8192 }",
            "min = { max_model_len = 1 }",
            {"floors": ["max_model_len=8192"]},
        ),
        (
            "min = { max_model_len = 1 }",
            "min = { max_model_len = 8192 }",
            {"floors": ["max_model_len=8192"]},
        ),
        (
            "min = { max_model_len = '8K' }",
            "min = { max_model_len = '8k' }",
            {"floors": ["max_model_len=8K"]},
        ),
        ("report = 'out.json'", "report = 'other.json'", {"report": "out.json"}),
    ],
)
def test_users_own_file_may_raise_and_the_table_restricts_it(project, own, table, options):
    assert read(project, table, own).options == options


@each(
    ("own", "said"),
    [
        ("formt = 'json'", "did you mean 'format'?"),
        ("max_relaunches = 3", "write max_attempts"),
        ("report = ['a']", "report must be text"),
        ("deadline = true", "deadline must be a time"),
        ("hang_after = 'soon'", "hang_after must be a time such as 30m"),
        ("gpus = true", "gpus must be text"),
        ("dry-run = 'yes'", "dry_run must be true or false"),
        ("broken", "config.toml"),
    ],
)
def test_error_in_the_users_file_is_reported_like_one_in_a_flag(project, own, said):
    with pytest.raises(UsageError) as raised:
        read(project, "", own)

    assert said in f"{raised.value} {raised.value.hint}"


def test_a_wrong_value_is_reported_with_its_file_and_its_key(project):
    for own, key, said in (
        ("max_attempts = -3", "max_attempts", "-3 is not a whole number"),
        ("allow = 'everything'", "allow", "'everything' is not one of"),
        ("pin = ['no_such']", "pin", "unknown setting: no_such"),
        ("min = { max_model_len = 'x' }", "min", "max_model_len must be"),
        ("report = 'r.txt'", "report", "unknown format"),
        ("rules = '/no/such'", "rules", "is not a folder"),
        ("rank = 5\nworld_size = 2", "rank", "too high"),
    ):
        own_file().parent.mkdir(parents=True, exist_ok=True)
        own_file().write_text(own)
        ran = run(project)
        assert ran.returncode == 2, own
        assert f"config.toml: {key}: " in ran.stderr
        assert said in ran.stderr


def test_a_wrong_value_is_reported_with_its_variable(project, monkeypatch):
    monkeypatch.setenv("OOMGUARD_MAX_ATTEMPTS", "abc")
    ran = run(project)
    assert ran.returncode == 2
    assert "OOMGUARD_MAX_ATTEMPTS: 'abc'" in ran.stderr


def test_the_user_s_own_file_lies_in_the_folder_that_xdg_names(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    assert own_file() == tmp_path / "mine" / "oomguard" / "config.toml"


@each(
    "text",
    [
        b"[tool.oomguard\n",
        b"[tool.oomguard]\npin = " + b"[" * 100_000,
        b"[tool.oomguard]\npin = '" + b"x" * 10_000_000 + b"'",
        b"[tool.oomguard]\n" + b"".join(b"k%d = 1\n" % i for i in range(20_000)),
    ],
)
def test_a_broken_or_hostile_table_is_told_and_ends_no_run(project, text):
    (project / "pyproject.toml").write_bytes(text)
    ran = run(project)

    assert (ran.returncode, ran.stdout) == (0, "hi\n")
    assert "ignored" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr) < 8000


def test_a_table_that_is_no_regular_file_is_not_waited_for(project):
    import os

    os.mkfifo(project / "pyproject.toml")
    ran = run(project)
    assert ran.stdout == "hi\n"
    assert read_configuration(project).files[0].left_out[0][1].endswith("not a regular file")


def test_a_file_without_a_table_says_nothing(project):
    (project / "pyproject.toml").write_text("[project]\nname = 'oomguard-user'\n")
    assert read_configuration(project).files == ()


def test_a_file_that_only_depends_on_oomguard_loads_no_parser(project):
    (project / "pyproject.toml").write_text("[project]\ndependencies = ['oomguard==0.2']\n")
    code = "import sys; from oomguard.cli.options import *; read_configuration(); print('tomllib' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"


def test_each_spelling_of_the_table_is_read(project):
    for text in (
        "[tool.oomguard]\npin = ['dtype']",
        "[ tool . 'oomguard' ]\npin = ['dtype']",
        "tool.oomguard.pin = ['dtype']",
        "[tool]\noomguard.pin = ['dtype']",
        "[ 'tool' ]\n[tool.x]\n[\"tool\".oomguard]\npin = ['dtype']",
        "tool = {oomguard = {pin = ['dtype']}}",
    ):
        (project / "pyproject.toml").write_text(text)
        assert read_configuration(project).options == {"pinned": ["dtype"]}, text


def test_a_working_directory_that_is_gone_has_no_table(project, monkeypatch):
    monkeypatch.chdir(project)
    project.rmdir()
    assert read_configuration() == Configuration()


def test_a_table_s_attempts_count_for_a_run_and_a_flag_wins(project):
    read(project, "max_attempts = 1\nreport = 'planted.json'\nallow = 'changes-outputs'")
    engine = Path(__file__).parents[1] / "analyst" / "fake_engine.py"

    def starts(*options: str) -> int:
        count = project / "count.log"
        count.unlink(missing_ok=True)
        words = [
            sys.executable,
            str(engine),
            "--count",
            str(count),
            "--fits",
            "100",
            "--estimate",
            "1792",
        ]
        command = [sys.executable, "-m", "oomguard", "run", *options, "--", *words]
        subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=project)
        return len(count.read_text().split())

    assert starts() == 1
    assert starts("--max-attempts", "2") == 2
    assert not (project / "planted.json").exists()


def test_verbose_names_each_file_and_what_was_skipped(project):
    read(project, "max_attempts = 1\nreport = 'planted.json'", own="grace = 5")
    said = run(project, "-v").stderr

    assert f"{own_file()}: grace=5" in said
    assert f"{project / 'pyproject.toml'}, [tool.oomguard]: max_attempts=1" in said
    assert "report: only a flag, OOMGUARD_REPORT or your own file" in said


def test_strangers_text_reaches_the_terminal_without_escapes(project):
    read(project, '"\\u001b]0;owned\\u0007" = 1\npin = "\\u001b[31m"')
    assert "\x1b" not in run(project, "-v").stderr


@pytest.mark.parametrize("command", [("rules", "list"), ("diagnose", "/dev/null")])
def test_the_other_commands_go_on_and_tell_it_too(project, command):
    read(project, "formt = 'json'")
    ran = oomguard_text(*command, cwd=project)

    assert ran.returncode == 0
    assert "did you mean 'format'?" in ran.stderr


def option_names(command: str) -> set[str]:
    """The options of a sub-command that take a default from a file: those that a variable sets too."""
    import importlib

    params = importlib.import_module(f"oomguard.cli.{command}").command.params
    return {
        str(param.envvar).removeprefix("OOMGUARD_").lower()
        for param in params
        if getattr(param, "envvar", None) and not param.hidden
    }


def test_the_user_s_own_file_may_set_every_option_of_run():
    assert option_names("run") - set(OPTIONS) == set()
