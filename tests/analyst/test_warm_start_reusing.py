"""run --reuse: what is known to work is taken for the same command, engine version and device, as far as the policy permits."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from oomguard.analyst.journal_hook import describe_start
from oomguard.analyst.warm_start import known_changes
from oomguard.engines.command import Launch
from oomguard.journal.queries import open_journal
from oomguard.journal.store import AttemptRow, Journal, RunIdentity
from oomguard.remedy.policy import make_policy

ENGINE = Path(__file__).with_name("fake_engine.py")
SERVE = ("vllm", "serve", "org/model", "--max-model-len", "32768")
PATCH = {
    "setting": "max_model_len",
    "from": 32768,
    "to": 1792,
    "effect": "reduces-capacity",
    "predicts": {"kv_cache_capacity_tokens": 1700},
    "tradeoff": "Longer requests are refused.",
}


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no vLLM whose version could be asked
    return Journal(tmp_path / "journal.sqlite3")


def write(
    journal: Journal,
    argv: tuple[str, ...] = SERVE,
    *,
    by_user: bool | None = True,
    patch: Any = None,
    **ran: Any,
):
    """A run of this folder that failed as given and ran with the patch."""
    patch = PATCH if patch is None else patch
    session = f"s{len(journal.records())}"
    what = RunIdentity(**{"engine": "vllm", "engine_version": "0.33.0", **ran})
    first = journal.begin(AttemptRow(session, 1, argv, {}, [], **describe_start(argv)))
    chosen = {patch["setting"]: by_user}
    journal.end(
        first, exit_status=1, incident={"kind": "x"}, measured={}, ran=what, set_by_user=chosen
    )
    second = journal.begin(
        AttemptRow(session, 2, [*argv, "changed"], {patch["setting"]: patch["to"]}, [patch])
    )
    journal.end(
        second, exit_status=0, incident=None, measured={"kv_cache_capacity_tokens": 1808}, ran=what
    )


def taken(
    journal: Journal,
    argv: tuple[str, ...] = SERVE,
    allow: str | None = "reduces-capacity",
    **policy: Any,
):
    patches = known_changes(
        Launch(argv), make_policy(allow, **policy), lambda: open_journal(journal.path)
    )
    return {patch.setting: patch.new for patch in patches}


def test_change_of_the_run_is_kept_with_its_measurements(journal: Journal, caplog):
    write(journal)
    (patch,) = known_changes(
        Launch(SERVE), make_policy("reduces-capacity"), lambda: open_journal(journal.path)
    )

    assert (patch.setting, patch.old, patch.new, str(patch.effect)) == (
        "max_model_len",
        32768,
        1792,
        "reduces-capacity",
    )
    assert patch.predicts == {"kv_cache_capacity_tokens": 1808}
    assert "run 1 of " in patch.reason
    assert patch.tradeoff == "Longer requests are refused."


def test_how_often_it_held_and_of_which_run_is_told(journal: Journal, capsys, monkeypatch):
    events: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        "oomguard.core.log._writer", [lambda _level, event, fields: events.append((event, fields))]
    )
    monkeypatch.setattr("oomguard.core.log._least", [0])
    write(journal)
    write(journal)
    taken(journal)

    assert [event for event, _fields in events] == ["Reusing settings that worked before"]
    assert (
        events[0][1].items()
        >= {"of_run": 2, "held": "2 of 2 times", "max_model_len": "32768 -> 1792"}.items()
    )


@pytest.mark.parametrize(
    ("allow", "policy"),
    [
        (None, {}),  # the user set it
        ("output-preserving", {}),
        ("reduces-capacity", {"pinned": ["max_model_len"]}),
        ("changes-outputs", {"minimum": {"max_model_len": 4096}}),
    ],
)
def test_what_the_policy_forbids_is_not_taken(journal: Journal, allow, policy):
    write(journal)

    assert taken(journal, allow=allow, **policy) == {}


def test_setting_left_alone_by_the_user_needs_no_permission(journal: Journal):
    argv = ("python", "job.py")
    write(journal, argv, by_user=False)

    assert taken(journal, argv, allow=None) == {"max_model_len": 1792}


def test_one_of_which_nobody_knows_whose_it_is_is_not(journal: Journal):
    argv = ("python", "job.py")
    write(journal, argv, by_user=None)

    assert taken(journal, argv, allow=None) == {}


@pytest.mark.parametrize(
    "argv",
    [
        ("vllm", "serve", "org/other", "--max-model-len", "32768"),
        (*SERVE, "--dtype", "float16"),
        ("vllm", "serve", "org/model", "--max-model-len", "16384"),  # a later choice of the user's
        ("python", "job.py"),
    ],
)
def test_nothing_is_taken_for_another_command(journal: Journal, argv):
    write(journal)

    assert taken(journal, argv) == {}


def test_a_command_that_has_the_change_already_is_left_as_it_is(journal: Journal):
    write(journal)

    assert taken(journal, ("vllm", "serve", "org/model", "--max-model-len", "1792")) == {}


def test_another_secret_is_the_same_command(journal: Journal):
    write(journal, (*SERVE, "--api-key", "Hunter2"))

    assert taken(journal, (*SERVE, "--api-key", "Correct7horse")) == {"max_model_len": 1792}


SCRIPT = "export HF_TOKEN={}; vllm bench latency --model ./m --max-model-len 32768"


def test_shell_command_with_another_secret_is_the_same(journal: Journal):
    write(journal, ("bash", "-c", SCRIPT.format("hf_abc")), by_user=False)

    assert taken(journal, ("bash", "-c", SCRIPT.format("hf_other"))) == {"max_model_len": 1792}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (
            ("sh", "-c", "export API_KEY=aaa; sh job.sh"),
            ("sh", "-c", "export API_KEY=aaa; sh other.sh"),
        ),
        (("sh", "-c", "API_KEY=aaa; sh job.sh"), ("sh", "-c", "API_KEY=aaa; sh other.sh")),
        (("sh", "-c", "serve --api-key=aaa --n 1"), ("sh", "-c", "serve --api-key=aaa --n 2")),
        (("ssh", "h", "API_KEY=aaa; sh job.sh"), ("ssh", "h", "API_KEY=aaa; sh other.sh")),
        (("ssh", "h", "API_KEY=aaa; sh job.sh"), ("ssh", "h", "API_KEY=aaa")),
    ],
)
def test_text_after_a_secret_makes_another_command(journal: Journal, then, now):
    write(journal, then, by_user=False)

    assert taken(journal, now) == {}


def test_another_device_is_another_matter(journal: Journal):
    write(journal, device="NVIDIA H100 80GB HBM3, 79.65 GiB")

    assert taken(journal) == {}


def test_a_script_that_has_changed_is_another_program(journal: Journal, tmp_path: Path):
    (tmp_path / "job.py").write_text("import vllm")
    write(journal, ("python", "job.py"), by_user=False)
    assert taken(journal, ("python", "job.py")) == {"max_model_len": 1792}

    (tmp_path / "job.py").write_text("import vllm  # a longer one")
    assert taken(journal, ("python", "job.py")) == {}


def test_a_model_of_another_folder_is_another_model(journal: Journal, tmp_path: Path, monkeypatch):
    argv = ("vllm", "serve", "./tiny")
    for name in ("a", "b"):
        (tmp_path / name / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    write(journal, argv, by_user=False)
    assert taken(journal, argv) == {"max_model_len": 1792}

    elsewhere = (*argv, "--port", "8001", "--served-model-name", "t")
    assert taken(journal, elsewhere) == {"max_model_len": 1792}
    assert taken(journal, (*argv, "--kv-cache-dtype", "fp8")) == {}

    monkeypatch.chdir(tmp_path / "b")
    assert taken(journal, argv) == {}
    assert taken(journal, elsewhere) == {}


@pytest.mark.parametrize(
    ("installed", "is_taken"), [("0.33.0", True), ("0.33.0+cpu", True), ("0.34.0", False)]
)
def test_another_version_of_the_engine_is_another_matter(
    journal, tmp_path, monkeypatch, installed, is_taken
):
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").touch()
    metadata = tmp_path / "site" / f"vllm-{installed}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    argv = (sys.executable, "job.py")
    write(journal, argv, by_user=False)

    assert bool(taken(journal, argv)) == is_taken


def test_settings_that_failed_since_are_not_reused(journal: Journal):
    write(journal, patch={**PATCH, "to": 1024})
    write(journal)
    row = journal.begin(
        AttemptRow("later", 1, SERVE, {"max_model_len": 1792}, [PATCH], **describe_start(SERVE))
    )
    journal.end(
        row, exit_status=1, incident={"kind": "x"}, measured={}, ran=RunIdentity("vllm", "0.33.0")
    )

    assert taken(journal) == {"max_model_len": 1024}


def test_a_command_that_ran_as_given_last_is_not_changed(journal: Journal):
    write(journal)
    row = journal.begin(AttemptRow("later", 1, SERVE, {}, [], **describe_start(SERVE)))
    journal.end(row, exit_status=0, incident=None, measured={}, ran=RunIdentity("vllm", "0.33.0"))

    assert taken(journal) == {}


def test_missing_or_damaged_journal_lets_the_command_run(tmp_path: Path):
    (tmp_path / "damaged").write_text(
        "no database at all, and long enough to be taken for one" * 20
    )
    policy = make_policy()

    assert known_changes(Launch(SERVE), policy, lambda: nullcontext(None)) == ()
    assert known_changes(Launch(SERVE), policy, lambda: open_journal(tmp_path / "damaged")) == ()


def run(
    tmp_path: Path, *options: str, engine: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--journal",
        str(tmp_path / "journal"),
        *options,
        "--",
    ]
    command += [sys.executable, str(ENGINE), "--count", str(tmp_path / "count.log"), *engine]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def lengths(tmp_path: Path) -> list[str]:
    found = (tmp_path / "count.log").read_text().split()
    (tmp_path / "count.log").unlink()
    return found


def test_second_run_reuses_what_worked_only_on_request(tmp_path: Path):
    assert run(tmp_path, "--reuse").returncode == 0
    assert lengths(tmp_path) == ["32768", "1792"]
    assert run(tmp_path).returncode == 0
    assert lengths(tmp_path) == ["32768", "1792"]

    ran = run(tmp_path, "--reuse")

    assert (ran.returncode, lengths(tmp_path)) == (0, ["1792"])
    assert (
        'Reusing settings that worked before: max_model_len="32768 -> 1792" of_run=2' in ran.stderr
    )
    assert 'held="2 of 2 times"' in ran.stderr
    assert "This run continues with reduced settings: max_model_len=1792" in ran.stderr
    last = Journal(tmp_path / "journal").records()[-1]
    assert (last.number, last.settings, last.patches[0]["to"]) == (1, {"max_model_len": 1792}, 1792)


def test_failed_known_good_settings_are_never_retried(tmp_path: Path):
    limit = tmp_path / "limit"
    script = tmp_path / "job.sh"
    script.write_text(f'exec {sys.executable} {ENGINE} --count "$1" --fits "$(cat {limit})"\n')
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--journal",
        str(tmp_path / "journal"),
        "--reuse",
        "--",
    ]
    command += ["sh", str(script), str(tmp_path / "count.log")]
    for fits in ("1792", "1024", "1024"):
        limit.write_text(fits)
        assert (
            subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 0
        )

    assert lengths(tmp_path) == ["32768", "1792", "1792", "1024", "1024"]


def test_nothing_known_is_told_in_one_line(tmp_path: Path):
    ran = run(tmp_path, "--reuse", engine=("--fits", "40000"))

    assert ran.stderr.splitlines() == [
        'oomguard: No settings reused: the command runs as given: reason="there is no journal yet"'
    ]
