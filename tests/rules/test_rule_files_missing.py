"""What would decide a failure whose cause is unknown: one thing, with a command, and nothing where the cause is known."""

from __future__ import annotations

import pytest

from oomguard.core.errors import RuleError
from oomguard.diagnosis import assess, default_rules, diagnose
from oomguard.remedy.policy import Policy
from oomguard.report.json import to_dict
from oomguard.rules.rule_files import load_rules

BARE = "RuntimeError: CUDA error: out of memory\n"
FIGURES = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; 21.10 GiB already allocated; 1.2 GiB free; 21.5 GiB reserved in total by PyTorch)\n"
KNOWN = "ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)."


@pytest.mark.parametrize(
    ("log", "command"),
    [
        (BARE, "nvidia-smi --query-gpu=memory.total,memory.used"),
        (FIGURES, "oomguard diagnose whole.log"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.\n", "rocm-smi"),
        ("ValueError: No available memory for the cache blocks.\n", "grep -E 'Model loading took"),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n",
            "grep -E 'Load weight",
        ),
        ("RuntimeError: No enough gpu memory for kv cache.\n", "nvidia-smi"),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
            "whole.log",
        ),
    ],
)
def test_deciding_step_is_shown_with_its_command(log, command):
    (incident,) = diagnose(log).incidents

    assert incident.causes[0].id == "unknown"
    assert command in incident.missing.command


def test_nothing_is_missing_where_the_cause_is_known():
    (incident,) = diagnose(KNOWN).incidents

    assert incident.causes[0].id == "max_model_len_too_large"
    assert incident.missing is None


def test_what_failed_here_was_heard_whole():
    (incident,) = diagnose(FIGURES).incidents

    assert assess(incident, default_rules(), Policy(), local_models=True).missing is None


def test_json_has_it_as_an_object_or_null():
    known, unknown = (to_dict(diagnose(log))["incidents"][0]["missing"] for log in (KNOWN, BARE))

    assert known is None
    assert set(unknown) == {"what", "command"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('kinds = ["cuda_omm"]', "unknown kind 'cuda_omm'"),
        ('unknown = ["device_total"]', "unknown fact 'device_total'"),
        ("of_a_log = 1", "expected bool"),
    ],
)
def test_a_mistake_in_the_file_is_refused_by_its_key(row, message, tmp_path):
    (tmp_path / "mine.toml").write_text(
        f'schema = 1\n[[missing]]\nwhat = "x"\ncommand = "y"\n{row}\n'
    )

    with pytest.raises(RuleError, match=message):
        load_rules([tmp_path])
