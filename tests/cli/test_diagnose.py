from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOG = """(APIServer pid=1) INFO 11-21 07:14:27 [api_utils.py:286] non-default args: {'model': './tiny', 'max_model_len': 32768, 'kv_cache_memory_bytes': 1000000}
(EngineCore pid=2) INFO 11-21 07:14:43 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./tiny'
(EngineCore pid=2) ERROR 11-21 07:14:52 [core.py:1510] ValueError: To serve at least one request with the model's max seq len (32768), (0.02 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum model length is 1792. Try increasing
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def diagnose(*arguments: str, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "oomguard", "diagnose", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False, cwd=cwd)


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
    for words in ("32768", "1792", "--max-model-len 1792", "--kv-cache-memory-bytes", "max_model_len_too_large"):
        assert words in text


def test_standard_input_is_read_with_a_dash_and_when_nothing_is_named():
    assert one("-", stdin=LOG.encode())["verdict"] == "oom"
    assert one(stdin=LOG.encode())["source"] == "-"


def test_inputs_keep_their_order_and_a_folder_means_its_files_sorted(tmp_path, log):
    for name in ("b.log", "a.log"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / name).write_text("fine\n")
    lines = diagnose("--format", "json", str(log), str(tmp_path / "logs")).stdout.splitlines()
    assert [Path(json.loads(line)["source"]).name for line in lines] == ["error.log", "a.log", "b.log"]


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
    assert one(str(path)) == {"schema": 1, "source": str(path), "verdict": "no_oom", "incidents": []}


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


def test_a_log_that_ends_in_the_middle_of_a_line_is_read_to_its_end(tmp_path):
    path = tmp_path / "cut.log"
    path.write_text(LOG[: LOG.index(" Based on")])
    incident = one(str(path))["incidents"][0]
    assert incident["facts"]["kv_cache_needed_bytes"] == 21474836
    assert "estimated_max_model_len_tokens" not in incident["facts"]


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
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(ran.stdout)["incidents"][0]["facts"]["estimated_max_model_len_tokens"] == 1792
    assert int(ran.stderr.split("VmHWM:")[1].split()[0]) < 150 * 1024  # KiB
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("arguments", [("--gpu-memory", "lots"), ("--gpu-memory", "0GiB"), ("--set", "max_model_len"), ("--set", "max_modl_len=3"), ("--min", "max_model_len=abc"), ("--pin", "nothing"), ("--format", "pdf"), ("--rules", "no-such-folder")])  # fmt: skip
def test_a_wrong_option_is_one_message_and_status_2(log, arguments):
    ran = diagnose(*arguments, str(log))
    assert ran.returncode == 2
    assert b"Traceback" not in ran.stderr
    assert ran.stderr.strip()


def test_a_typo_in_a_setting_gets_a_suggestion(log):
    assert b"did you mean max_model_len?" in diagnose("--set", "max_modl_len=3", str(log)).stderr


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


def test_options_come_from_pyproject_and_a_typo_there_is_told(tmp_path, log):
    (tmp_path / "pyproject.toml").write_text('[tool.oomguard]\nformat = "json"\n')
    assert json.loads(diagnose(str(log), cwd=tmp_path).stdout)["verdict"] == "oom"
    (tmp_path / "pyproject.toml").write_text('[tool.oomguard]\nformt = "json"\n')
    ran = diagnose(str(log), cwd=tmp_path)
    assert ran.returncode == 2
    assert b"did you mean 'format'?" in ran.stderr


def test_a_reader_that_goes_away_gets_no_traceback(log):
    command = f"'{sys.executable}' -m oomguard diagnose {' '.join([str(log)] * 50)} | head -1"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in ran.stderr


LOGS = Path(__file__).parents[2] / "examples" / "logs"


@pytest.mark.parametrize(
    ("name", "kind", "cause", "setting", "value"),
    [
        ("vllm_serve_kv_cache", "kv_cache_too_small_for_max_len", "max_model_len_too_large", "max_model_len", 1792),
        ("vllm_script_utilization_too_low", "cpu_node_memory", "utilization_too_low", "gpu_memory_utilization", 0.19),
        ("vllm_script_utilization_too_high", "cpu_node_memory", "utilization_too_high", "gpu_memory_utilization", 0.82),
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

    def test_seed_000_names_no_growth_of_the_cache_and_keeps_the_users_remedy(self, shared):
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
        for words in ("3.79 GiB / 8.00 GiB = 0.47", "1.27", "no utilization up to 1.0 helps on a card below 18.95 GiB"):
            assert words in utilization["reason"]
        for name in ("max_num_batched_tokens", "limit_mm_per_prompt", "max_num_seqs"):
            assert plan[name]["to"] is None
            assert "peak activation: not printed" in plan[name]["reason"]

    def test_seed_002_without_the_cards_size_says_what_is_missing(self, shared):
        (incident,) = one(self.seed(shared, "002"))["incidents"]
        utilization = next(p for p in incident["plan"] if p["setting"] == "gpu_memory_utilization")
        assert utilization["to"] is None
        assert "3.79 GiB / device total, which is not printed" in utilization["reason"]
        assert "below 18.95 GiB" in utilization["reason"]

    @pytest.mark.parametrize("number", ["003", "004"])
    def test_seeds_without_an_error_text_have_no_incident(self, shared, number):
        assert one(self.seed(shared, number))["incidents"] == []


def test_a_large_card_is_helped_by_a_higher_utilization(shared):
    seed = str(next((shared / "seeds").glob("002_*.txt")))
    (incident,) = one("--gpu-memory", "80GiB", seed)["incidents"]
    patch = next(p for p in incident["plan"] if p["setting"] == "gpu_memory_utilization")
    assert patch["to"] is not None
    assert patch["to"] > 0.80
