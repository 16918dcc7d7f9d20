from __future__ import annotations

import gzip
import json
import os
import pickle
import pty
import random
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import oomguard
from oomguard.report.html import to_html
from support.each import each
from support.hostile_pickles import hostile_pickles
from support.in_process import oomguard_bytes
from support.made_snapshots import example

LOG = """(APIServer pid=1) INFO 11-21 07:14:27 [api_utils.py:286] non-default args: {'model': './tiny', 'max_model_len': 32768, 'kv_cache_memory_bytes': 1000000}
(EngineCore pid=2) INFO 11-21 07:14:43 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./tiny'
(EngineCore pid=2) ERROR 11-21 07:14:52 [core.py:1510] ValueError: To serve at least one request with the model's max seq len (32768), (0.02 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum model length is 1792. Try increasing
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def diagnose(
    *arguments: str, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    return oomguard_bytes("diagnose", *arguments, stdin=stdin, cwd=cwd)


def processor_s() -> float:
    """Processor time of the children that have ended: a busy machine leaves it as it is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one(*arguments: str, stdin: bytes = b"") -> dict:
    ran = diagnose("--format", "json", *arguments, stdin=stdin)
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "error.log"
    path.write_text(LOG)
    return path


def test_the_contracts_example_comes_out(log):
    answer = one(str(log))
    (incident,) = answer["incidents"]
    assert answer["source"] == str(log)
    assert answer["verdict"] == "oom"
    assert incident["kind"] == "kv_cache_too_small_for_max_len"
    assert incident["framework_version"] == "0.32.0"
    assert incident["location"]["process"] == "EngineCore pid=2"
    assert incident["facts"]["estimated_max_model_len_tokens"] == 1792
    assert incident["causes"][0]["id"] == "max_model_len_too_large"
    assert incident["plan"][0]["as_flag"] == "--max-model-len 1792"
    assert incident["alternatives"][0]["setting"] == "kv_cache_memory_bytes"


def test_the_panel_names_cause_numbers_and_commands(log):
    text = diagnose(str(log)).stdout.decode()
    for words in (
        "32768",
        "1792",
        "--max-model-len 1792",
        "--kv-cache-memory-bytes",
        "oomguard explain OG201",
    ):
        assert words in text


def test_dash_or_no_name_reads_standard_input():
    assert one("-", stdin=LOG.encode())["verdict"] == "oom"
    assert one(stdin=LOG.encode())["source"] == "-"


def test_inputs_keep_their_order_and_folders_are_sorted(tmp_path, log):
    for name in ("b.log", "a.log"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / name).write_text("fine\n")
    lines = diagnose("--format", "json", str(log), str(tmp_path / "logs")).stdout.splitlines()
    assert [Path(json.loads(line)["source"]).name for line in lines] == [
        "error.log",
        "a.log",
        "b.log",
    ]


def test_exit_code_tells_the_verdict_only_when_asked(tmp_path, log):
    fine = tmp_path / "fine.log"
    fine.write_text("INFO all is well\n")
    assert diagnose(str(log)).returncode == 0
    assert diagnose("--exit-code", str(log)).returncode == 1
    assert diagnose("--exit-code", str(fine)).returncode == 0


def test_a_missing_file_is_one_message_and_the_rest_is_done(tmp_path, log):
    ran = diagnose("--format", "json", str(tmp_path / "no.log"), str(log))
    assert ran.returncode == 2
    assert len(ran.stdout.splitlines()) == 1
    assert b"no.log: No such file or directory" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_an_empty_file_is_a_clean_no(tmp_path):
    path = tmp_path / "empty.log"
    path.touch()
    answer = one(str(path))
    assert (answer["source"], answer["verdict"], answer["incidents"]) == (str(path), "no_oom", [])


def test_a_binary_file_is_a_clean_no(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(bytes(range(256)) * 4000)
    assert one(str(path))["verdict"] == "no_oom"


def test_a_failure_between_binary_bytes_is_found(tmp_path):
    path = tmp_path / "mixed"
    path.write_bytes(b"\x00\xff\xfe\n" * 100 + LOG.encode() + b"\x00\x80\n" * 100)
    assert one(str(path))["verdict"] == "oom"


def test_invalid_utf8_inside_a_line_does_no_harm(tmp_path):
    path = tmp_path / "latin.log"
    path.write_bytes(LOG.encode().replace(b"ERROR", b"\xe9\xff ERROR"))
    assert one(str(path))["verdict"] == "oom"


def test_powershells_utf16_is_read(tmp_path):
    path = tmp_path / "utf16.log"
    path.write_bytes(LOG.encode("utf-16"))
    assert one(str(path))["verdict"] == "oom"


def test_a_single_line_of_200_mb_is_read_in_little_memory(tmp_path):
    path = tmp_path / "long.log"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(LOG.splitlines()[2].encode())
        for _ in range(100):
            file.write(b"y" * (1 << 20))
    code = (
        "import pathlib, sys, runpy\nsys.argv = ['oomguard', 'diagnose', '--format', 'json', sys.argv[1]]\n"
        "try:\n    runpy.run_module('oomguard', run_name='__main__')\nfinally:\n"
        "    print(pathlib.Path('/proc/self/status').read_text(), file=sys.stderr)\n"
    )
    began = processor_s()
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(ran.stdout)["incidents"][0]["facts"]["estimated_max_model_len_tokens"] == 1792
    assert int(ran.stderr.split("VmHWM:")[1].split()[0]) < 150 * 1024  # KiB
    assert processor_s() - began < 60


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu-memory", "lots"),
        ("--gpu-memory", "0GiB"),
        ("--set", "max_model_len"),
        ("--set", "max_modl_len=3"),
        ("--min", "max_model_len=abc"),
        ("--pin", "nothing"),
        ("--format", "pdf"),
        ("--rules", "no-such-folder"),
    ],
)
def test_a_wrong_option_is_one_message_and_status_2(log, arguments):
    ran = diagnose(*arguments, str(log))
    assert ran.returncode == 2
    assert b"Traceback" not in ran.stderr
    assert ran.stderr.strip()


def test_a_typo_in_a_rule_file_names_file_line_and_key(tmp_path, log):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.toml").write_text(
        'schema = 1\nkind = "cuda_oom"\nframwork = "x"\nwording = []\ntest = []\n'
    )
    ran = diagnose("--rules", str(tmp_path / "rules"), str(log))
    assert ran.returncode == 2
    assert b"mine.toml:3" in ran.stderr
    assert b"did you mean 'framework'?" in ran.stderr


def test_an_empty_folder_is_a_clean_nothing(tmp_path):
    ran = diagnose("--format", "json", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (0, b"")
    assert ran.stderr.endswith(b": this folder contains no files\n")
    assert diagnose("--quiet", str(tmp_path)).stderr == b""


def test_options_come_from_pyproject_and_a_typo_there_is_told(tmp_path, log):
    (tmp_path / "pyproject.toml").write_text('[tool.oomguard]\nformat = "json"\n')
    assert json.loads(diagnose(str(log), cwd=tmp_path).stdout)["verdict"] == "oom"
    (tmp_path / "pyproject.toml").write_text('[tool.oomguard]\nformt = "json"\n')
    ran = diagnose(str(log), cwd=tmp_path)
    assert ran.returncode == 0
    assert b"did you mean 'format'?" in ran.stderr


def test_a_reader_that_goes_away_gets_no_traceback(log):
    command = (
        shlex.join([sys.executable, "-m", "oomguard", "diagnose", *[str(log)] * 50]) + " | head -1"
    )
    ran = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in ran.stderr


def test_a_compressed_log_is_read_by_name_and_on_standard_input(tmp_path):
    path = tmp_path / "error.log.gz"
    path.write_bytes(gzip.compress(LOG.encode()))
    assert one(str(path))["verdict"] == "oom"
    assert one("-", stdin=path.read_bytes())["verdict"] == "oom"


def test_damaged_archive_gives_its_readable_part_and_an_error(tmp_path, log):
    path = tmp_path / "cut.log.gz"
    numbers = random.Random(1)
    noise = b"".join(b"%f\n" % numbers.random() for _ in range(20_000))
    path.write_bytes(gzip.compress(LOG.encode() + noise)[:-1000])
    ran = diagnose("--format", "json", str(path), str(log))
    first, second = map(json.loads, ran.stdout.splitlines())
    assert ran.returncode == 2
    assert (first["verdict"], second["verdict"]) == ("oom", "oom")
    assert ["the gzip data ends early" in note for note in first["notes"]] == [True]
    assert re.search(
        rb"cut.log.gz: the gzip data ends early; oomguard read \d+ unpacked bytes", ran.stderr
    )


def test_a_damaged_archive_without_a_failure_is_not_called_clean(tmp_path):
    (path := tmp_path / "cut.log.gz").write_bytes(gzip.compress(b"fine\n" * 20_000)[:-10])
    for form in ("terminal", "md"):
        ran = diagnose("--format", form, str(path))
        assert (ran.returncode, ran.stdout) == (2, b"")
        assert b"the gzip data ends early" in ran.stderr


def test_a_folder_means_its_regular_files_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.log").write_text("fine\n")
    assert one(str(tmp_path))["source"] == str(tmp_path / "a.log")


def test_folder_includes_logs_of_subfolders_names_the_skipped(tmp_path):
    (tmp_path / "runs" / "7").mkdir(parents=True)
    (tmp_path / "runs" / "7" / "serve.log").write_text(LOG)
    (tmp_path / "runs" / "weights.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    (tmp_path / "runs" / "serve.py").write_text("import vllm\n")
    ran = diagnose("--format", "json", str(tmp_path))
    (line,) = ran.stdout.splitlines()
    assert json.loads(line)["source"] == str(tmp_path / "runs" / "7" / "serve.log")
    assert json.loads(line)["verdict"] == "oom"
    assert b"skipped 2 files in sub-folders (binary or source code)" in ran.stderr
    assert diagnose("-q", str(tmp_path)).stderr == b""


@pytest.mark.parametrize("form", ["terminal", "markdown", "html"])
def test_an_empty_file_is_said_to_be_empty(tmp_path, form):
    (tmp_path / "error.log").write_bytes(b"")
    said = diagnose("--format", form, str(tmp_path / "error.log")).stdout.decode()
    assert "empty" in said
    assert "no memory failure" not in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_told_and_the_rest_is_done(tmp_path, log):
    (tmp_path / "shut").mkdir(mode=0)
    (tmp_path / "mine.log").touch(mode=0)
    ran = diagnose("--format", "json", str(tmp_path / "shut"), str(tmp_path / "mine.log"), str(log))
    assert ran.returncode == 2
    assert len(ran.stdout.splitlines()) == 1
    assert ran.stderr.count(b"Permission denied") == 2


def test_a_fifo_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "diagnose",
        "--format",
        "json",
        str(tmp_path / "pipe"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        (tmp_path / "pipe").write_text(LOG)
        assert json.loads(process.communicate(timeout=60)[0])["verdict"] == "oom"


def test_a_device_that_never_ends_is_refused():
    device = "/dev/zero"
    for words in (f"diagnose {device}", f"diagnose - < {device}"):
        line = f"{shlex.quote(sys.executable)} -m oomguard {words}"
        ran = subprocess.run(["bash", "-c", line], capture_output=True, timeout=200, check=False)
        assert ran.returncode == 2
        assert b"is a device, not a log" in ran.stderr


def test_the_null_device_and_closed_standard_input_do_no_harm():
    assert one("/dev/null")["verdict"] == "no_oom"
    ran = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m oomguard diagnose - <&-"],
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 2
    assert b"standard input: Bad file descriptor" in ran.stderr


def test_any_name_is_given_back_as_it_was_and_harms_no_terminal(tmp_path):
    name = b"new\nl\x1b[31mi\xffne.log"
    path = os.fsencode(tmp_path) + b"/" + name
    with open(path, "w") as file:
        file.write(LOG)
    for words in (b"", b"missing"):
        for form in ("json", "terminal"):
            ran = subprocess.run(
                [sys.executable, "-m", "oomguard", "diagnose", "--format", form, path + words],
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert ran.returncode == (2 if words else 0)
            assert b"Traceback" not in ran.stderr
            assert b"\x1b" not in ran.stderr
            if form == "json" and not words:
                assert os.fsencode(json.loads(ran.stdout.decode())["source"]) == path
            if form == "terminal":
                assert b"\x1b" not in ran.stdout


def test_the_same_file_twice_is_two_results(log):
    first, second = diagnose("--format", "json", str(log), str(log)).stdout.splitlines()
    assert first == second


def test_quiet_prints_nothing_for_a_clean_input_except_in_json(tmp_path, log):
    fine = tmp_path / "fine.log"
    fine.write_text("INFO fine\n")
    for form in ("terminal", "markdown", "html"):
        assert diagnose("-q", "--format", form, str(fine)).stdout == b""
        assert diagnose("-q", "--format", form, str(fine), str(log)).stdout
    assert diagnose("-q", "--format", "json", str(fine)).stdout


def test_verbose_lists_settings_and_facts_with_their_sources(log):
    text = diagnose("-v", "--set", "max_num_seqs=64", str(log)).stdout.decode()
    assert "effective settings" in text
    assert "  max_num_seqs = 64 (given)" in text
    assert re.search(r"  estimated_max_model_len_tokens = 1792 \(printed, line 3\)", text)


def test_a_secret_is_masked_unless_it_is_asked_for(tmp_path):
    path = tmp_path / "error.log"
    path.write_text(
        LOG.replace("ValueError: To", "HF_TOKEN=hf_abcdefghijklmnopqrstuv ValueError: To")
    )
    secret = b"hf_abcdefghijklmnopqrstuv"
    for form in ("terminal", "json", "markdown", "html"):
        assert secret not in diagnose("-v", "--format", form, str(path)).stdout
    assert secret in diagnose("--no-mask", "--format", "json", str(path)).stdout


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("r.json", b"{"),
        ("r.jsonl", b"{"),
        ("r.md", b"###"),
        ("r.html", b"<!doctype"),
        ("r.txt", b"oomguard[OG201]: "),
    ],
)
def test_output_goes_to_a_file_in_the_form_of_its_name(tmp_path, log, name, begins):
    ran = diagnose("--output", str(tmp_path / name), str(log))
    assert (ran.returncode, ran.stdout) == (0, b"")
    written = (tmp_path / name).read_bytes()
    assert written.startswith(begins)
    assert b"\x1b" not in written


def test_output_over_an_input_or_unwritable_is_refused(tmp_path, log):
    for name in (str(log), str(tmp_path / "no" / "r.json")):
        ran = diagnose("--output", name, str(log))
        assert ran.returncode == 2
        assert b"--output" in ran.stderr
    assert log.read_text() == LOG


def test_several_inputs_are_one_html_page(tmp_path, log):
    fine = tmp_path / "fine.log"
    fine.write_text("INFO fine\n")
    paths = [log, fine, log]
    expected = to_html(*(oomguard.diagnose(path) for path in paths))
    assert diagnose("--format", "html", *map(str, paths)).stdout.decode() == expected
    assert expected.count("<body") == 1


def on_a_terminal(*arguments: str) -> str:
    """What a person sees, escapes included."""
    pid, screen = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "oomguard", "diagnose", *arguments])
    seen = b""
    while True:
        try:
            block = os.read(screen, 1 << 16)
        except OSError:
            break
        if not block:
            break
        seen += block
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return seen.decode()


def test_bar_over_several_files_disappears_at_the_end(tmp_path, log):
    fine = tmp_path / "fine.log"
    fine.write_text("INFO fine\n" * 1000)
    seen = on_a_terminal(str(log), str(fine))
    assert "of 2 inputs" in seen
    last = seen.rindex("of 2 inputs")
    assert "\x1b[2K" in seen[last:]
    assert (
        "no memory failure found" in seen
    )  # above the bar where a slow machine draws it once more


LOGS = Path(__file__).parents[2] / "examples" / "logs"


@each(
    ("name", "kind", "cause", "setting", "value"),
    [
        (
            "vllm_serve_kv_cache",
            "kv_cache_too_small_for_max_len",
            "max_model_len_too_large",
            "max_model_len",
            1792,
        ),
        (
            "vllm_script_utilization_too_low",
            "cpu_node_memory",
            "utilization_too_low",
            "gpu_memory_utilization",
            0.192,
        ),
        (
            "vllm_script_utilization_too_high",
            "cpu_node_memory",
            "utilization_too_high",
            "gpu_memory_utilization",
            0.82,
        ),
    ],
)
def test_logs_of_the_real_vllm_are_explained_and_solved(name, kind, cause, setting, value):
    """The logs in examples/ come from the real engine; in the second one the KV need is not printed, only estimated."""
    (incident,) = one(str(LOGS / f"{name}.log"))["incidents"]
    assert incident["kind"] == kind
    assert incident["framework_version"] == "0.32.0"
    assert incident["causes"][0]["id"] == cause
    assert incident["plan"][0]["setting"] == setting
    assert incident["plan"][0]["to"] == value


class TestSeeds:
    """The documents the project grew from: what their error texts say, and where their advice is wrong."""

    def seed(self, shared: Path, number: str) -> str:
        return str(next((shared / "seeds").glob(f"{number}_*.txt")))

    def test_seed_000_blames_no_cache_growth_and_keeps_the_remedy(self, shared):
        (incident,) = one(self.seed(shared, "000"))["incidents"]
        assert incident["kind"] == "cuda_oom"
        assert incident["facts"]["process_in_use_bytes"] == 94 * 2**30
        assert incident["causes"][0]["confidence"] < 0.5
        assert "prefix caching cannot make it grow" in incident["causes"][0]["explanation"]
        settings = {p["setting"]: p for p in incident["plan"]}
        assert settings["enable_prefix_caching"]["to"] is False
        assert settings["max_num_batched_tokens"]["to"] is None
        assert settings["gpu_memory_utilization"]["to"] is None

    def test_seed_001_gives_the_numbers_and_stays_below_one_half(self, shared):
        (incident,) = one(self.seed(shared, "001"))["incidents"]
        facts = incident["facts"]
        assert facts["tried_bytes"] == round(6.40 * 2**30)
        assert facts["reserved_unallocated_bytes"] == round(132.54 * 2**20)
        assert incident["causes"][0]["confidence"] < 0.5
        assert all(p["setting"] != "max_new_tokens" for p in incident["plan"])

    def test_seed_002_says_that_no_utilization_helps(self, shared):
        (incident,) = one("--gpu-memory", "8GiB", self.seed(shared, "002"))["incidents"]
        plan = {p["setting"]: p for p in incident["plan"]}
        utilization = plan["gpu_memory_utilization"]
        assert utilization["to"] is None
        assert utilization["from"] == 0.80
        for words in (
            "3.79 GiB / 8.00 GiB = 0.47",
            "1.27",
            "no utilization up to 1.0 helps on a card below 18.95 GiB",
        ):
            assert words in utilization["reason"]
        for name in ("max_num_batched_tokens", "limit_mm_per_prompt", "max_num_seqs"):
            assert plan[name]["to"] is None
            assert "peak activation: not printed" in plan[name]["reason"]

    @pytest.mark.parametrize("number", ["003", "004"])
    def test_seeds_without_an_error_text_have_no_incident(self, shared, number):
        assert one(self.seed(shared, number))["incidents"] == []


def test_a_large_card_is_helped_by_a_higher_utilization(shared):
    seed = str(next((shared / "seeds").glob("002_*.txt")))
    (incident,) = one("--gpu-memory", "80GiB", seed)["incidents"]
    patch = next(p for p in incident["plan"] if p["setting"] == "gpu_memory_utilization")
    assert patch["to"] is not None
    assert patch["to"] > 0.80


def test_hostile_pickle_is_reported_last_and_runs_nothing(log, tmp_path):
    snapshot, hostile = tmp_path / "a.pickle", tmp_path / "b.pickle"
    snapshot.write_bytes(pickle.dumps(example().in_pieces()))
    hostile.write_bytes(hostile_pickles(tmp_path / "marker")["REDUCE of os.system, protocol 5"])
    ran = diagnose("--format", "json", str(hostile), str(snapshot), str(log))
    assert [json.loads(line)["verdict"] for line in ran.stdout.splitlines()] == ["oom", "oom"]
    assert ran.returncode == 2
    assert (
        b"b.pickle: not read as an allocation snapshot: it would import posix.system" in ran.stderr
    )
    assert not (tmp_path / "marker").exists()


def test_panels_of_several_logs_have_a_blank_line_between_them(tmp_path, log):
    fine = tmp_path / "fine.log"
    fine.write_text("all is well\n")
    text = diagnose(str(log), str(log), str(fine), str(fine)).stdout.decode()

    panels = text.split("\n\noomguard[OG201]: ")
    assert len(panels) == 2
    assert text.endswith(f"\n\n{fine}: no memory failure found\n{fine}: no memory failure found\n")
