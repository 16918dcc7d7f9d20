"""Help pages, misspelt names, wrong values, old names and completion, as a user meets them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from oomguard.cli import _group
from oomguard.cli.options import COMMON, GroupedCommand, Option
from support.in_process import oomguard_text

OLD = Path(__file__).parents[1] / "journal" / "schema_1.sqlite3"
MODEL = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def commands(group: click.Group = _group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield each command with the words that call it; a group only through its commands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def own_options(command: click.Command) -> list[Option]:
    return [param for param in command.params if isinstance(param, Option) and not param.hidden]


def test_each_help_text_is_one_plain_sentence_then_the_default(subtests):
    for name, command in commands():
        for option in own_options(command):
            with subtests.test(f"{name} {option.opts[-1]}"):
                text = option.help or ""
                words = text.split()
                assert text[0].isupper()
                assert text.endswith(".")
                assert 4 <= len(words) <= 25
                assert not re.search(r"\.\s+[A-Z]", text)
                assert "default" not in text


def test_the_options_that_matter_first_are_six_at_most_and_open_the_page(subtests):
    for name, command in commands():
        with subtests.test(name):
            assert isinstance(command, GroupedCommand)
            names = [param.name for param in command.params]
            assert len(command.common) <= 6
            assert set(command.common) <= set(names)
            page = oomguard_text(*name.split(), "--help").stdout
            groups = re.findall(r"^(\S.*):$", page, re.MULTILINE)
            assert groups[0] in {COMMON, "Advanced", "Output and help"}
            assert groups[-2:] == ["Output and help", "Example"]


def test_each_help_page_ends_with_an_example_that_parses(subtests):
    for name, command in commands():
        with subtests.test(name):
            words = shlex.split(command.example)
            path = name.split()
            assert words[: len(path) + 1] == ["oomguard", *path]
            command.make_context(name, words[len(path) + 1 :])
            last = oomguard_text(*path, "--help").stdout.splitlines()[-1]
            assert last.strip() == command.example


def test_the_first_page_lists_the_main_commands_and_examples_that_exist():
    lines = oomguard_text("--help").stdout.splitlines()
    main = lines.index("Main commands:")
    assert [line.split()[0] for line in lines[main + 1 : main + 4]] == ["diagnose", "run", "plan"]
    examples = [shlex.split(line) for line in lines if line.startswith("  oomguard ")]
    assert {words[1] for words in examples} <= set(dict(commands()))
    assert len(examples) >= 4


def test_an_option_name_has_one_meaning_in_all_commands():
    kinds: dict[str, set[str]] = {}
    for _, command in commands():
        for option in own_options(command):
            for spelling in option.opts:
                if spelling.startswith("--"):
                    kinds.setdefault(spelling, set()).add(
                        f"{type(option.type).__name__} {option.is_flag}"
                    )
    # plan reads its size itself, because it answers a wrong one in JSON too
    assert kinds.pop("--gpu-memory") == {"SizeText False", "StringParamType False"}
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}
    # gpus names devices in both
    assert [name for name, _ in commands() if f"--{name}" in kinds] == ["gpus"]


@pytest.mark.parametrize("columns", ["20", "80"])
def test_a_wrong_line_gives_the_mistake_and_what_to_write(subtests, tmp_path, columns):
    (tmp_path / "oom.log").write_text(f"{OOM}\n")
    (tmp_path / "folder").mkdir()
    wrong = [
        ("diagnos oom.log", "no command 'diagnos'", "did you mean: oomguard diagnose oom.log"),
        ("oom.log", "no command 'oom.log'", "oomguard diagnose oom.log"),
        ("vllm serve m", "no command 'vllm'", "oomguard run -- vllm serve m"),
        ("zzz", "no command 'zzz'", "oomguard --help"),
        ("--formt json", "no option --formt", "oomguard --help"),
        ("rules shw OG201", "no command 'shw'", "did you mean: oomguard rules show OG201"),
        ("run", "no command to run", "oomguard run --"),
        ("run python x.py", "-- is missing", "oomguard run -- python x.py"),
        ("run --dry-runn -- true", "run has no option --dry-runn", "did you mean --dry-run?"),
        ("run --allow all -- true", "--allow: 'all' is not one of", "--allow reduces-capacity"),
        ("run --pin max_modle_len -- true", "did you mean max_model_len?", "--pin max_model_len"),
        ("run --min max_model_len -- true", "is not SETTING=VALUE", "--min max_model_len=8192"),
        ("run --min max_model_len=x -- true", "a whole number above 0", "--min max_model_len="),
        ("run --max-attempts 0 -- true", "'0' is not a whole number", "--max-attempts 4"),
        ("run --deadline soon -- true", "--deadline: 'soon' is not a time", "--deadline 1h30m"),
        ("run --input none -- true", "'none' does not exist (for --input)", "for example"),
        ("run --input folder -- true", "is a directory (for --input)", "for example"),
        ("diagnose --formt json oom.log", "no option --formt", "did you mean --format?"),
        ("diagnose --format pdf oom.log", "--format: 'pdf' is not one of", "--format json"),
        ("diagnose oom.log --format", "needs a value", "--format json"),
        ("diagnose --gpu-memory 24 oom.log", "'24' has no unit; write 24GiB", "24GiB"),
        ("diagnose --gpu-memory big oom.log", "'big' is not a size", "24GiB"),
        ("diagnose --gpu-memory 0GiB oom.log", "must be above zero", "--gpu-memory 24GiB"),
        ("diagnose --set x=1 oom.log", "--set: unknown setting: x", "--set max_model_len"),
        ("diagnose --jobs many oom.log", "--jobs: 'many' is not a whole number", "--jobs 4"),
        ("diagnose --since 7 oom.log", "'7' is not an age or a date", "--since 24h"),
        ("diagnose none.log", "none.log: No such file", "path of a log"),
        ("plan", "plan needs MODEL", "oomguard plan Qwen/Qwen3-8B --gpu-memory 24GiB"),
        ("plan m --gpu-memory 24", "24, a size without a unit", "24GiB"),
        ("plan m --gpu-memory-utilization 90", "not in the range", "utilization 0.9"),
        ("plan m --max-modle-len 5", "no option --max-modle-len", "--max-model-len?"),
        ("plan m n", "unexpected extra argument", "oomguard plan"),
        ("diff oom.log", "diff needs NEW", "oomguard diff worked.log failed.log"),
        ("diff a b --allow reduces-capacity", "diff has no option --allow", "--help"),
        ("history x", "N: 'x' is not a whole number of at least 1", "oomguard history"),
        ("history --limit -1", "'-1' is not a whole number of at least 0", "--limit 20"),
        ("history --keep 7", "'7' is not an age with a unit", "--keep 90d"),
        ("history --format html", "--format: 'html' is not one of", "--format json"),
        ("contribute", "contribute needs LOG", "oomguard contribute start.log"),
        ("doctor --journl x", "no option --journl", "did you mean --journal?"),
        ("gpus --lease-folder oom.log", "is a file (for --lease-folder)", "--lease-folder /"),
    ]
    for line, mistake, instead in wrong:
        with subtests.test(line):
            ran = oomguard_text(*shlex.split(line), cwd=tmp_path, env={"COLUMNS": columns})
            lines = ran.stderr.splitlines()
            assert (ran.returncode, ran.stdout, len(lines)) == (2, "", 2)
            assert lines[0].startswith("oomguard: ")
            assert mistake in lines[0]
            assert instead in lines[1]


def test_a_wrong_value_of_a_variable_names_the_variable():
    ran = oomguard_text("history", env={"OOMGUARD_LIMIT": "many"})
    assert ran.returncode == 2
    assert ran.stderr.startswith("oomguard: OOMGUARD_LIMIT: 'many' is not a whole number")


def test_old_names_work_and_give_the_new_one_once(tmp_path):
    (tmp_path / "oom.log").write_text(f"{OOM}\n")
    for line, status, old, new in (
        ("report oom.log", 2, "oomguard report", "oomguard contribute"),
        ("diagnose --engine local oom.log", 0, "--engine", "--on"),
        ("diagnose --engine=local oom.log", 0, "--engine", "--on"),
    ):
        ran = oomguard_text(*line.split(), cwd=tmp_path)
        assert ran.returncode == status
        assert ran.stderr.count(f"{old} is now called {new}") == 1
    for form in ("md", "markdown"):
        assert oomguard_text("diagnose", "oom.log", "--format", form, cwd=tmp_path).stdout[:3] == (
            "###"
        )


def test_the_old_limit_of_a_run_counts_one_attempt_more(tmp_path):
    engine = Path(__file__).parents[1] / "analyst" / "fake_engine.py"
    for limit in ("--max-relaunches=1", "--max-attempts=2"):
        (count := tmp_path / "count.log").unlink(missing_ok=True)
        words = [sys.executable, str(engine), "--count", str(count), "--fits", "100"]
        command = [sys.executable, "-m", "oomguard", "run", limit, "--", *words]
        command += ["--estimate", "1792"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert len(count.read_text().split()) == 2
        assert ("is now called --max-attempts" in ran.stderr) == ("relaunches" in limit)


def test_every_command_with_a_format_writes_markdown(subtests, tmp_path):
    (tmp_path / "oom.log").write_text(f"{OOM}\n")
    (tmp_path / "journal.db").write_bytes(OLD.read_bytes())
    journal = ["--journal", "journal.db"]
    plan = ["plan", str(MODEL), "--gpu-memory", "24GiB"]
    lines: dict[str, tuple[list[str], str]] = {
        "diagnose": (["diagnose", "oom.log"], "### "),
        "plan": (plan, "\n| KV cache | "),
        "sweep": ([*plan, "--sweep", "max_model_len=4096,8192"], "|---:|---:|"),
        "history": (["history", *journal], "\n|---:|---|---|---|\n| 4 | "),
        "run 1": (["history", "1", *journal], "- run 1: repaired, exit 0"),
        "fleet": (["history", "--fleet", *journal], "\n| 1 of 1 | "),
        "doctor": (["doctor"], "- ok oomguard"),
        "gpus": (["gpus"], "- "),
    }
    for name, (words, part) in lines.items():
        with subtests.test(name):
            ran = oomguard_text(*words, "--format", "md", cwd=tmp_path)
            assert ran.returncode == 0, ran.stderr
            assert part in ran.stdout
            assert "\x1b" not in ran.stdout
    with_format = {
        name.split()[0]
        for name, command in commands()
        if any(option.name == "form" for option in own_options(command))
    }
    assert with_format - {words[0] for words, _ in lines.values()} - {"diff"} == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("oomguard dia", "diagnose"),
        ("oomguard run --al", "--allow"),
        ("oomguard run --allow red", "reduces-capacity"),
        ("oomguard plan m --gpu-na", "--gpu-name"),
        ("oomguard diagnose --format m", "md"),
        ("oomguard rules sh", "show"),
    ],
)
def test_a_shell_completes_commands_options_and_values(line, found):
    variables = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_OOMGUARD_COMPLETE": "bash_complete",
    }
    ran = subprocess.run(
        [Path(sys.executable).with_name("oomguard")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **variables},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"plain,{found}" in ran.stdout.splitlines()
