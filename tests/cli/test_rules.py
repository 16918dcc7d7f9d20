"""``oomguard rules``: what is in force, shown, tested and written as pages; a mistake is one message, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.rules.rule_files import load_rules
from support.each import each
from support.in_process import oomguard_text

ROOT = Path(__file__).parents[2]
RULE = """schema = 1
code = "MY100"
cause = "unknown"
title = "Mine"
since = "1.0"
status = "experimental"
kinds = ["other"]
when = ["tried_bytes > 0.0"]
confidence = [{ base = 0.4 }]
[explain]
summary = "{tried_bytes:GiB} was asked for."
why = "Of mine."
confirm = "Look."
[[reference]]
note = "here"
[[test]]
kind = "other"
facts = { tried_bytes = 1073741824 }
[[test]]
kind = "other"
facts = {}
expect_no_match = true
"""
SIGNATURE = """schema = 1
kind = "other"
framework = "mine"
[[wording]]
anchor = "boom"
pattern = "boom"
source = "here"
[[test]]
log = "nothing of it"
expect = {}
"""


def rules(*arguments: str) -> subprocess.CompletedProcess[str]:
    return oomguard_text("rules", *arguments)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with one good rule file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.toml").write_text(RULE)
    return folder


def test_shipped_rules_are_valid_and_pass_their_own_tests():
    assert rules("check").returncode == 0
    ran = rules("test")
    assert ran.returncode == 0, ran.stdout
    assert "0 problems" in ran.stdout


def test_the_list_has_code_cause_and_title():
    assert "OG201  max_model_len_too_large" in rules("list").stdout


def test_the_list_has_signatures_only_where_asked_for():
    assert "vllm/kv_cache_none_left" not in rules("list").stdout
    assert "vllm/kv_cache_none_left " in rules("list", "--signatures").stdout


def test_a_failing_rule_test_is_told(tmp_path):
    (tmp_path / "mine.toml").write_text(SIGNATURE)
    ran = rules("test", "--rules", str(tmp_path))
    assert ran.returncode == 1
    assert "mine.toml: test[0] does not match" in ran.stdout
    assert "no near miss" in ran.stdout


@each("name", ["OG201", "og201", "max_model_len_too_large"])
def test_a_rule_is_shown_by_its_code_and_by_its_cause(name):
    ran = rules("show", name)

    assert ran.returncode == 0
    for words in (
        "# OG201: ",
        "## Confidence",
        "## How to confirm it",
        "## What to change, and what it costs",
        "## Example",
        "## References",
        "cost: The engine refuses longer requests.",
    ):
        assert words in ran.stdout


@each("name", ["vllm/kv_cache_none_left", "kv_cache_none_left"])
def test_a_signature_is_shown_by_its_name_and_by_its_kind(name):
    ran = rules("show", name)

    assert "# vllm/kv_cache_none_left" in ran.stdout
    assert "- anchor: `No available memory for the cache blocks" in ran.stdout


def test_every_rule_and_signature_can_be_shown():
    from oomguard.cli.rules import _rule_page, _signature_page

    found = load_rules()
    for rule in found.rules:
        assert _rule_page(rule, found).startswith(f"# {rule.code}: ")
    for signature in found.signatures:
        assert _signature_page(signature).startswith(f"# {signature.name}\n")


@each(
    ("name", "hint"), [("OG20l", "OG20"), ("max_model_len_to_large", "'max_model_len_too_large'")]
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, hint):
    ran = rules("show", name)

    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"no rule or signature has the name '{name}'" in ran.stderr
    assert "did you mean" in ran.stderr
    assert hint in ran.stderr


def test_an_unknown_name_near_to_nothing_names_the_list():
    assert "oomguard rules list --signatures" in rules("show", "qqqqqqqq").stderr


def test_a_user_s_rule_is_shown_with_its_own_example(mine):
    ran = rules("show", "MY100", "--rules", str(mine))

    assert "1.00 GiB was asked for. Of mine." in ran.stdout
    assert f"from `{mine / 'mine.toml'}`" in ran.stdout


def test_escapes_of_a_rule_file_do_not_reach_the_terminal(mine):
    (mine / "mine.toml").write_text(RULE.replace('"Mine"', '"\\u001b[31mMine"'))

    for arguments in (("list",), ("show", "MY100"), ("show", "MY100", "--color", "always")):
        assert "\x1b[31mMine" not in rules(*arguments, "--rules", str(mine)).stdout


@each(
    ("old", "new", "where"),
    [
        ("schema = 1", "schema = ", ":1, column 10"),
        ('status = "experimental"', 'status = "new"', ", status: 'new' is not a known status"),
        ("tried_bytes > 0.0", "tried_byte > 0.0", ", column 1, when[0]: unknown fact 'tried_byte'"),
        (
            "tried_bytes = 1073741824",
            'tried_bytes = "much"',
            ", test[0].facts.tried_bytes: expected int, got 'much'",
        ),
        (
            "facts = {}",
            "facts = {}\nexpect = { plan = [{ to = 1 }] }",
            ", test[1].expect.plan: expected a list",
        ),
    ],
)
def test_a_mistake_is_one_message_with_file_key_and_place(
    mine, old, new, where, monkeypatch, capsys
):
    from oomguard.cli import main

    assert old in RULE
    (mine / "mine.toml").write_text(RULE.replace(old, new))
    monkeypatch.chdir(mine)
    with pytest.raises(SystemExit) as stopped:
        main(["rules", "pages", "out", "--rules", str(mine)])

    said = capsys.readouterr()
    assert (stopped.value.code, said.out) == (2, "")
    assert said.err.startswith(f"oomguard: {mine / 'mine.toml'}")
    assert where in said.err
    assert not (mine / "out").exists()


@each("command", [("check",), ("show", "OG201")])
def test_a_folder_that_is_missing_is_named(tmp_path, command):
    ran = rules(*command, "--rules", str(tmp_path / "nowhere"))

    assert ran.returncode == 2
    assert f"{tmp_path / 'nowhere'}: there is no such folder of rules" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_fix_without_a_setting_is_reported_with_file_and_key(mine):
    fix = '[[fix]]\nsetting = "batch_sise"\neffect = "output-preserving"\nvalue = "1.0"\n[[reference]]'
    (mine / "mine.toml").write_text(RULE.replace("[[reference]]", fix))
    ran = rules("check", "--rules", str(mine))

    assert ran.returncode == 2
    assert f"{mine / 'mine.toml'}:" in ran.stderr
    assert (
        "fix[0].setting: unknown setting 'batch_sise'\n  did you mean 'batch_size'?" in ran.stderr
    )


def test_what_is_named_like_a_page_and_is_no_file_is_left_alone(tmp_path):
    (tmp_path / "pages").mkdir()
    os.mkfifo(tmp_path / "pages" / "mine.md")

    assert rules("pages", str(tmp_path / "pages")).returncode == 0
    assert (tmp_path / "pages" / "mine.md").is_fifo()


def test_pages_are_written_once_and_the_same_every_time(tmp_path):
    first = rules("pages", str(tmp_path / "pages"))
    texts = {path.name: path.read_bytes() for path in (tmp_path / "pages").iterdir()}
    second = rules("pages", str(tmp_path / "pages"))

    assert set(texts) == {f"{rule.code}.md" for rule in load_rules().rules} | {"README.md"}
    assert f"{len(texts)} changed" in first.stdout
    assert ", 0 changed" in second.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "pages").iterdir()} == texts


def test_page_of_a_removed_rule_goes_and_a_persons_page_stays(tmp_path, mine):
    rules("pages", str(tmp_path / "pages"), "--rules", str(mine))
    (tmp_path / "pages/guide.md").write_text("written by hand")
    rules("pages", str(tmp_path / "pages"))

    assert not (tmp_path / "pages/MY100.md").exists()
    assert (tmp_path / "pages/guide.md").read_text() == "written by hand"


def test_check_names_the_pages_that_differ_and_writes_nothing(tmp_path):
    rules("pages", str(tmp_path))
    (tmp_path / "OG201.md").write_text(f"{(tmp_path / 'OG201.md').read_text()} more")
    (tmp_path / "OG202.md").unlink()
    ran = rules("pages", str(tmp_path), "--check")

    assert ran.returncode == 1
    assert ran.stdout.splitlines() == [
        f"{tmp_path / name} is not up to date" for name in ("OG201.md", "OG202.md")
    ]
    assert not (tmp_path / "OG202.md").exists()


def test_a_file_in_place_of_the_folder_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    ran = rules("pages", str(tmp_path / "file"))

    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert str(tmp_path / "file") in ran.stderr


def test_file_of_the_same_name_by_a_person_is_not_replaced(tmp_path):
    (tmp_path / "README.md").write_text("about my project")
    ran = rules("pages", str(tmp_path))

    assert ran.returncode == 2
    assert f"{tmp_path / 'README.md'} was not written by this command" in ran.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".md"] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "about my project"


def test_the_user_s_own_rules_are_in_force_without_a_flag(mine, tmp_path, monkeypatch):
    command = ("show", "MY100")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "oomguard").mkdir()
    (tmp_path / "oomguard" / "config.toml").write_text(f"rules = ['{mine}']\nformat = 'json'\n")
    ran = subprocess.run(
        [sys.executable, "-m", "oomguard", "rules", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert ran.returncode == 0
    assert ("MY100" in ran.stdout) if command[0] != "test" else (ran.stdout != rules("test").stdout)
