from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support.driving import transcript
from support.each import each
from support.in_process import oomguard_text
from support.supervising import RUN


def oomguard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomguard", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_missing_double_dash_is_told_with_the_command_to_paste():
    ran = oomguard_text("run", "--allow", "reduces-capacity", "python", "a b.py")
    assert ran.returncode == 2
    assert "-- is missing before the command" in ran.stderr
    assert "oomguard run --allow reduces-capacity -- python 'a b.py'" in ran.stderr


@each("arguments", [("run",), ("run", "--"), ("run", "--dry-run"), ("run", "--dry-run", "--")])
def test_no_command_is_told(arguments):
    ran = oomguard_text(*arguments)
    assert ran.returncode == 2
    assert "no command to run" in ran.stderr


@each(
    "options",
    [
        ("--allow", "everything"),
        ("--pin", "nothing"),
        ("--min", "x"),
        ("--report", "out.pdf"),
        ("--report", "out"),
        ("--max-attempts", "0"),
        ("--nonsense",),
    ],
)
def test_wrong_option_is_one_message_and_nothing_starts(options, tmp_path):
    marker = tmp_path / "started"
    ran = oomguard_text("run", *options, "--", "touch", str(marker))
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert not marker.exists()


def test_an_option_without_its_value_is_named(tmp_path):
    marker = tmp_path / "started"
    for words, name in (
        (("--journal", "--report", "x"), "--journal"),
        (("--report", "x.md", "--pin"), "--pin"),
        (("--grace", "-q"), "--grace"),
    ):
        ran = oomguard_text("run", *words, "--", "touch", str(marker))
        assert ran.returncode == 2
        assert f"{name} needs a value" in ran.stderr
    assert "--journal needs a value" in oomguard_text("run", "--journal").stderr
    assert not marker.exists()


def test_a_word_before_the_dashes_that_is_no_option_is_named(tmp_path):
    ran = oomguard_text("run", "--grace", "5", "vllm", "--", "touch", str(tmp_path / "started"))
    assert ran.returncode == 2
    assert "'vllm' before -- is not an option" in ran.stderr
    assert not (tmp_path / "started").exists()


def test_a_rank_beyond_the_world_size_is_refused(tmp_path):
    for rendezvous in ((), ("--rendezvous", "none"), ("--rendezvous", str(tmp_path))):
        ran = oomguard("run", "--rank", "5", "--world-size", "2", *rendezvous, "--", "true")
        assert ran.returncode == 2
        assert "--rank 5 is too high for --world-size 2" in ran.stderr


def test_what_follows_the_dashes_belongs_to_the_command():
    ran = oomguard("run", "-q", "--", "echo", "--allow", "--help", "--", "-q")
    assert ran.stdout == "--allow --help -- -q\n"


def test_the_version_is_printed():
    import oomguard as package

    assert oomguard_text("--version").stdout == f"oomguard {package.__version__}\n"


def test_help_is_shown_for_every_command():
    for command in ((), ("run",), ("diagnose",), ("rules",), ("rules", "check")):
        ran = oomguard_text(*command, "--help")
        assert ran.returncode == 0
        assert "Usage" in ran.stdout


def test_an_unknown_command_is_status_2():
    assert oomguard_text("diagnos").returncode == 2


def test_secrets_of_the_command_are_not_printed():
    ran = oomguard("run", "--", "sh", "-c", "exit 1", "--api-key", "abcdefgh12345")
    assert "abcdefgh12345" not in ran.stderr


def test_secrets_are_masked_in_what_there_is_to_paste(tmp_path):
    engine = str(Path(__file__).parents[1] / "analyst" / "fake_engine.py")
    journal = tmp_path / "journal.sqlite3"
    words = (
        "--dry-run",
        "--journal",
        str(journal),
        "--",
        sys.executable,
        engine,
        "--count",
        "/dev/null",
        "--api-key=xy",
        "--password",
        "abc",
    )
    ran = oomguard("run", "--log-format", "json", *words)
    assert "Dry run" in ran.stderr
    assert "--api-key='***'" in ran.stderr or "--api-key=***" in ran.stderr
    assert "--api-key=xy" not in ran.stderr
    assert "--password abc" not in ran.stderr
    assert b"--api-key=xy" not in journal.read_bytes()
    assert journal.stat().st_mode & 0o077 == 0


@each("form", ["console", "json"])
def test_no_secret_or_escape_reaches_screen_report_or_journal(tmp_path, form):
    engine = str(Path(__file__).parents[1] / "analyst" / "fake_engine.py")
    line = "DBPASS=Hunter2 mysql -pHunter2 | curl -u me:Hunter2 'https://h/x?key=Hunter2' \x1b]0;owned\x07 \x1b[31m"
    words = [
        line,
        "--auth",
        "Hunter2",
        "--key",
        "Hunter2",
        "FOO_KEY=Hunter2",
        "gsk_" + "a1B2" * 8,
        "\x1b[2J",
    ]
    report, journal = tmp_path / "report.html", tmp_path / "journal.sqlite3"
    options = ("--log-format", form, "--report", str(report), "--journal", str(journal), "-v", "--")
    ran = oomguard("run", *options, sys.executable, engine, *words)

    assert "RESULT 1792" in ran.stdout
    raw = journal.read_bytes()
    assert b"Hunter2" not in raw
    assert b"a1B2" not in raw
    with contextlib.closing(sqlite3.connect(journal)) as database:
        # The file itself may have the bytes of an escape: they are also lengths of two columns.
        stored = "\n".join(database.iterdump())
    for text in (ran.stderr, report.read_text(), stored):
        assert "Hunter2" not in text
        assert "a1B2" not in text
        assert "\x1b[" not in text
        assert "\x1b]" not in text


def test_a_home_folder_stays_in_what_there_is_to_paste(tmp_path):
    """In quotes a shell leaves ``~`` as it is."""
    engine = str(Path(__file__).parents[1] / "analyst" / "fake_engine.py")
    words = ("--", sys.executable, engine, "--count", "/dev/null", "/home/alice/my job")
    ran = oomguard("run", "--dry-run", "-v", *words)
    assert ran.stderr.count("'/home/alice/my job'") >= 2  # below the panel, and of the attempt
    assert "~/my job" not in ran.stderr


def test_a_home_folder_stays_in_the_hint_that_adds_the_dashes():
    assert (
        "-- python '/home/alice/my job.py'"
        in oomguard_text("run", "python", "/home/alice/my job.py").stderr
    )


def test_without_colour_no_escape_reaches_a_terminal():
    engine = str(Path(__file__).parents[1] / "analyst" / "fake_engine.py")
    shown = {}
    for color in ("always", "never"):
        options = ["--color", color, "--journal", "/dev/null/none"]
        shown[color] = transcript(
            [*RUN, *options, "--", sys.executable, engine, "--count", "/dev/null"]
        )
    assert b"\x1b[" in shown["always"]
    assert b"\x1b" not in shown["never"]
    assert b"oomguard[OG201]: vLLM could not start" in shown["never"]


def test_pasteable_command_without_dashes_has_no_secret():
    ran = oomguard_text("run", "python", "x.py", "--api-key", "Hunter2")
    assert "oomguard run -- python x.py --api-key" in ran.stderr
    assert "Hunter2" not in ran.stderr


def test_one_value_of_a_repeatable_option_needs_no_list(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.oomguard]\npin = 'max_model_len'\nmin = { max_model_len = 8192 }\n"
    )
    command = [sys.executable, "-m", "oomguard", "run", "-q", "--", "echo", "hi"]
    assert (
        subprocess.run(
            command, capture_output=True, timeout=60, check=False, cwd=tmp_path
        ).returncode
        == 0
    )


@each("value", ["nan", "-1", "soon"])
def test_a_deadline_that_is_no_time_is_refused(value):
    assert oomguard_text("run", "--deadline", value, "--", "echo").returncode == 2


def test_report_in_a_missing_folder_is_refused_before_the_run(tmp_path):
    ran = oomguard_text(
        "run",
        "--report",
        str(tmp_path / "no" / "report.json"),
        "--",
        "touch",
        str(tmp_path / "ran"),
    )
    assert ran.returncode == 2
    assert not (tmp_path / "ran").exists()


def test_report_is_written_after_a_success_too(tmp_path):
    report = tmp_path / "report.json"
    assert oomguard("run", "--report", str(report), "--", "true").returncode == 0
    assert json.loads(report.read_text())["incidents"] == []


LOG = Path(__file__).parents[2] / "examples" / "logs" / "vllm_0.12.0_start_worked.log"
EIGHT_B = json.loads(
    (Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json").read_text()
)


def weights_of(config: dict) -> bytes:
    """The head of a safetensors file with an 8B's tensors; no byte of them follows, and none is read."""
    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
    }
    layers = config["num_hidden_layers"]
    shapes = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(layers)
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096)}
    head = json.dumps(
        {n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    ).encode()
    return struct.pack("<Q", len(head)) + head


def learned(tmp_path: Path, text: str, *, weights: bool = True, **config: object) -> list[dict]:
    """The calibrations that a run printing this log leaves; its model's folder has this configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    whole = {**EIGHT_B, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    if weights:
        (folder / "model.safetensors").write_bytes(weights_of(whole))
    log = tmp_path / "start.log"
    log.write_text(text.replace("org/Model-8B-Instruct", str(folder)))
    # an engine's stand-in: a command that ends with cat only quotes a start, which is not kept
    engine = (sys.executable, "-c", "import sys; print(open(sys.argv[1]).read())", str(log))
    ran = oomguard("run", "-q", "--", *engine)
    assert ran.returncode == 0
    assert ran.stderr == ""
    kept = Path(os.environ["XDG_STATE_HOME"]) / "oomguard" / "calibrations.json"
    return json.loads(kept.read_text())["calibrations"] if kept.exists() else []


def test_what_a_start_measured_is_kept_for_the_plans_to_come(tmp_path):
    (entry,) = learned(tmp_path, LOG.read_text())
    assert (entry["of"]["version"], entry["of"]["tensor_parallel_size"]) == ("0.12", 1)
    assert "oomguard run on " in entry["correction"]["source"]
    options = (
        "--gpu-memory",
        "23.64GiB",
        "--engine-version",
        "0.12",
        "--gpu-memory-utilization",
        "0.9",
        "--max-num-seqs",
        "256",
    )
    lengths = ("--max-num-batched-tokens", "2048", "--max-model-len", "32768")
    ran = oomguard_text("plan", str(tmp_path / "model"), *options, *lengths, "--format", "json")
    assert json.loads(ran.stdout)["kv_cache_tokens"] == 40128  # what that start printed


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("org/Model-8B-Instruct", "org/No-Folder", {}),
        ("0.12.0", "", {}),
        ("x", "x", {"num_hidden_layers": 16}),
        ("x", "x", {"weights": False}),
    ],
)
def test_what_says_nothing_of_a_model_here_is_not_kept(old, new, changes, tmp_path):
    assert learned(tmp_path, LOG.read_text().replace(old, new), **changes) == []
