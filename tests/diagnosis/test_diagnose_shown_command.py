"""A log that shows the engine's command gets the whole changed command to paste."""

from __future__ import annotations

import oomguard

TOO_LONG = (
    "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can "
    "be stored in KV cache (7344). Try increasing `gpu_memory_utilization` or decreasing "
    "`max_model_len` when initializing the engine.\n"
)


def pasted(first_line: str) -> str:
    """The line below "Do this"."""
    lines = str(oomguard.diagnose(text=f"{first_line}\n{TOO_LONG}")).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("Do this: "))
    return lines[at + 1]


def test_the_whole_command_is_shown_with_the_new_value():
    for line, changed in [
        ("vllm serve org/m --port 8000", "vllm serve org/m --port 8000 --max-model-len 7344"),
        (
            "me@host:~$ vllm serve org/m --max-model-len 32768",
            "vllm serve org/m --max-model-len 7344",
        ),
        (
            "+ python -m vllm.entrypoints.openai.api_server --model org/m --max-model-len=32768",
            "python -m vllm.entrypoints.openai.api_server --model org/m --max-model-len 7344",
        ),
    ]:
        assert pasted(line) == f"  {changed}"


def test_a_line_that_is_no_single_command_gives_the_flag_alone():
    for line in [
        "vllm serve org/m --port 8000 | tee log",
        "vllm serve org/m --port 8000 \\",
        "we ran vllm serve org/m --port 8000",
        "  vllm serve org/m --port 8000",
        "python train.py --steps 3",
        "vllm serve 'org/m --port 8000",
    ]:
        assert pasted(line).startswith("  --max-model-len 7344"), line


def test_a_secret_in_the_command_is_hidden():
    assert "abc123secret" not in pasted("vllm serve org/m --api-key abc123secret")
