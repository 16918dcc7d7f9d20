"""The device's size and free memory, as programs and people state them beside a failure that prints neither."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.facts import GIB, MIB
from oomguard.observe.search_time import SearchTime
from oomguard.observe.stated_figures import FIRST_LINES, LAST_LINES, stated_on
from oomguard.rules.load import load_rules

FIGURES = load_rules().stated
EXAMPLES = [pytest.param(f, text, id=f"{n}-{i}") for n, f in enumerate(FIGURES) for i, text in enumerate(f.examples)]
OTHERS = [pytest.param(f, text, id=f"{n}-{i}") for n, f in enumerate(FIGURES) for i, text in enumerate(f.others)]
BARE = "RuntimeError: CUDA error: out of memory"
HOST = "Out of memory: Killed process 4242 (python3)"


def facts(text: str) -> dict[str, object]:
    """Return the device's figures of a text's first incident."""
    incident = oomguard.diagnose(text).incidents[0]
    return {n: f.value for n, f in incident.facts.items() if n in {"device_total_bytes", "device_free_bytes"}}


@pytest.mark.parametrize(("figure", "text"), EXAMPLES)
def test_each_example_states_a_figure_and_holds_a_word_of_its_row(figure, text) -> None:
    assert list(stated_on(figure, text, SearchTime()))
    assert any(word in text.lower() for word in figure.words)


@pytest.mark.parametrize(("figure", "text"), OTHERS)
def test_what_is_no_statement_of_a_row_states_nothing(figure, text) -> None:
    assert list(stated_on(figure, text, SearchTime())) == []


@pytest.mark.parametrize(
    ("said", "total_bytes"),
    [
        ("I have an RTX 3080 (10GB)", 10 * GIB),
        ("GPU memory: 4095MiB", 4095 * MIB),
        ("### GPU VRAM\n\n12GB", 12 * GIB),
        (
            "|   0  GeForce GTX 105...  Off  |\n|  0%   38C    P8    N/A / 120W |      0MiB /  4040MiB |      0%  |",
            4040 * MIB,
        ),
        ("Device: GeForce GTX 960, global mem 4042 MB", 4042 * MIB),
        ("48GB unified memory", 48 * GIB),
    ],
)
def test_a_size_stated_above_or_below_a_failure_is_the_devices(said: str, total_bytes: int) -> None:
    assert facts(f"{said}\n\n{BARE}") == facts(f"{BARE}\n\n{said}") == {"device_total_bytes": total_bytes}


def test_sizes_that_differ_are_nobodys() -> None:
    assert facts(f"RTX 3080 (10GB)\nRTX 3090 (24GB)\n{BARE}") == {}


def test_several_equal_devices_have_one_size() -> None:
    assert facts(f"GPU: 8xA100 80G\nA100 80GB\n{BARE}") == {"device_total_bytes": 80 * GIB}


def test_a_programs_own_figure_counts_before_a_nominal_one() -> None:
    total = 24214 * MIB
    line = "  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes, VRAM: 24214 MiB"
    assert facts(f"RTX 3090 24GB\n{line}\n{BARE}") == {"device_total_bytes": total}


def test_the_messages_own_figure_stays() -> None:
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.50 GiB of which 1.00 MiB is free."
    assert facts(f"RTX 3090 (24GB)\n{message}")["device_total_bytes"] == round(23.5 * GIB)


@pytest.mark.parametrize(
    "said",
    [
        "You need an RTX 4090 24GB for it",
        "It works on an RTX 3090 24GB",
        "It takes 20GB of VRAM",
        "Peak GPU memory: 11 GB",
        "32GB of RAM",
    ],
)
def test_advice_needs_and_other_machines_state_no_size(said: str) -> None:
    assert facts(f"{said}\n{BARE}") == {}


def test_a_size_below_what_is_held_is_another_machines() -> None:
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory, this process has 20.00 GiB memory in use."
    assert "device_total_bytes" not in facts(f"RTX 3070 (8GB)\n{message}")


def test_the_hosts_memory_is_the_hosts_alone() -> None:
    assert facts(f"a machine with 32GB of RAM and an RTX 3070 (8GB)\n{HOST}") == {"device_total_bytes": 32 * GIB}


def test_a_containers_limit_is_the_total_of_what_was_killed_in_it() -> None:
    assert facts(f"    Limits:\n      cpu: 4\n      memory: 16Gi\n    Reason: OOMKilled\n{HOST}") == {
        "device_total_bytes": 16 * GIB
    }


def test_what_stands_amid_a_long_log_is_not_looked_at() -> None:
    step = "step done\n"
    text = f"{step * FIRST_LINES}RTX 3080 (10GB)\n{step * LAST_LINES}{BARE}"
    assert facts(text) == {}


def test_a_text_without_a_failure_states_nothing() -> None:
    assert oomguard.diagnose("RTX 3080 (10GB)\nGPU memory: 4095MiB").incidents == ()
