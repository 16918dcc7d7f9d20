"""Settings that a pasted script gives through its variables."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.observe.script_values import script_values

FAILED = "ValueError: No available memory for the cache blocks."


def values(text: str) -> dict[str, object]:
    """Return the settings' values that the lines of a script give, by fact."""
    return {name: fact.value for name, fact in script_values(enumerate(text.splitlines(), 1)).items()}


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("LEN=6144\nvllm serve m --max-model-len=$LEN", {"max_model_len_tokens": 6144}),
        ('export SHARE="0.55"  # half\nvllm serve m --gpu-memory-utilization ${SHARE} \\', {"gpu_memory_utilization_ratio": 0.55}),
        ("vllm serve m --max-num-seqs ${SEQS:-48}", {"max_num_seqs": 48}),
        ("SEQS=24\nvllm serve m --max-num-seqs ${SEQS:-48}", {"max_num_seqs": 24}),
    ],
)  # fmt: skip
def test_a_flag_has_the_value_of_its_variable(script: str, given: dict[str, object]) -> None:
    assert values(script) == given


def test_of_two_starts_the_first_one_counts() -> None:
    assert values("n=6144\na --max-model-len $n\nn=2048\nb --max-model-len $n") == {"max_model_len_tokens": 6144}


@pytest.mark.parametrize(
    "script",
    [
        "LEN=6144\nvllm serve m --max-model-len $OTHER",
        "vllm serve m --max-model-len $LEN\nLEN=6144",
        "LEN=`cat len`\nvllm serve m --max-model-len $LEN",
        "N=8\nprogram --no-setting-of-ours $N",
        "LEN=0.5\nvllm serve m --max-model-len $LEN",
    ],
)
def test_what_no_assignment_above_gives_is_unknown(script: str) -> None:
    assert values(script) == {}


def test_a_failure_has_the_settings_of_the_script_above_it() -> None:
    filler = "\n".join(f"    -e OPTION_{n}=x \\" for n in range(30))
    text = f"len=6144\ndocker run \\\n{filler}\n    --max-model-len=$len\n\n{FAILED}"
    assert oomguard.diagnose(text).incidents[0].facts["max_model_len_tokens"].value == 6144


def test_what_is_printed_outranks_the_script() -> None:
    text = f"len=6144\nvllm serve m --max-model-len $len\nINFO Using max model len 2048\n{FAILED}"
    assert oomguard.diagnose(text).incidents[0].facts["max_model_len_tokens"].value == 2048
