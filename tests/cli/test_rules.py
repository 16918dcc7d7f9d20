from __future__ import annotations

import subprocess
import sys


def rules(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomguard", "rules", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_shipped_rules_have_no_mistakes_and_pass_their_own_tests():
    assert rules("check").returncode == 0
    ran = rules("test")
    assert ran.returncode == 0, ran.stdout
    assert "0 problems" in ran.stdout


def test_the_list_has_code_cause_and_title():
    assert "OG201  max_model_len_too_large" in rules("list").stdout


def test_a_failing_rule_test_is_told(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'schema = 1\nkind = "other"\nframework = "mine"\n'
        '[[wording]]\nanchor = "boom"\npattern = "boom"\nsource = "here"\n'
        '[[test]]\nlog = "nothing of it"\nexpect = {}\n'
    )
    ran = rules("test", "--rules", str(tmp_path))
    assert ran.returncode == 1
    assert "mine.toml: test[0] does not match" in ran.stdout
    assert "no near-miss" in ran.stdout
