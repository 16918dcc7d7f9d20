"""Which of the devices a command gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomguard.cluster.placement.devices import DeviceSlot
from oomguard.cluster.placement.need import DeviceNeed, Fitness, need_of
from oomguard.cluster.placement.placer import first_of_one_model, rank_devices
from oomguard.core.facts import GIB
from oomguard.engines.command import Launch
from support.each import each
from support.placing import LLAMA_8B


@pytest.fixture
def need(tmp_path: Path) -> DeviceNeed:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return need_of(
        Launch(("vllm", "serve", str(tmp_path), "--max-model-len", "8192", "--port", "8001"))
    )


def device(index: int, size_gib: int, held_gib: int = 0) -> DeviceSlot:
    by_pid = {41: held_gib * GIB} if held_gib else {}
    return DeviceSlot(
        index, f"GPU-{index}", f"of {size_gib}", size_gib * GIB, (size_gib - held_gib) * GIB, by_pid
    )


def chosen(need: DeviceNeed, *places: DeviceSlot) -> list[int]:
    return [place.index for place in rank_devices(need, places, lambda fitness: fitness.fits)]


def test_the_need_is_read_from_the_command_itself(need):
    assert (need.devices, need.engines, need.unknown) == (1, 1, None)
    assert need.start is not None
    assert need.start.asked.settings.max_model_len == 8192


def test_the_smallest_empty_device_on_which_it_fits_comes_first(need):
    assert chosen(need, device(0, 80), device(1, 24), device(2, 12), device(3, 40)) == [1, 3, 0]


def test_shared_device_comes_last_and_only_with_room(need):
    assert chosen(need, device(0, 80, 5), device(1, 24), device(2, 24, 9)) == [1, 0]


def test_unknown_need_gets_only_unused_devices_largest_first():
    need = need_of(Launch(("python", "train.py")))
    assert (need.start, need.tells_start) == (None, False)
    assert chosen(need, device(0, 24), device(1, 80), device(2, 80, 1)) == [1, 0]


def test_device_of_unknown_size_is_not_assumed_to_fit(need):
    assert chosen(need, DeviceSlot(0, "GPU-0", "A")) == []


def test_several_devices_are_of_one_kind_where_they_can_be():
    places = [device(0, 24), device(1, 80), device(2, 80)]
    assert [p.index for p in first_of_one_model(places, 2) or ()] == [1, 2]
    assert [p.index for p in first_of_one_model(places, 3) or ()] == [0, 1, 2]
    assert first_of_one_model(places, 4) is None


@each(
    ("flags", "devices", "engines"),
    [
        (("-tp", "2"), 2, 1),
        (("-tp=2", "--pipeline-parallel-size", "2"), 4, 1),
        (("--data-parallel-size", "3", "-tp", "2"), 6, 3),
    ],
)
def test_ranks_of_every_kind_take_devices_of_their_own(tmp_path, flags, devices, engines):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    need = need_of(Launch(("vllm", "serve", str(tmp_path), *flags)))
    assert (need.devices, need.engines) == (devices, engines)


@each(
    ("command", "why"),
    [
        (("python", "train.py"), "not an engine's own command"),
        (("vllm", "serve", "/nowhere/at/all"), "cannot be planned"),
        (
            ("bash", "-c", 'vllm serve "$MODEL" --max-model-len $LEN'),
            "cannot be planned|only the shell knows|no model",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(command, why):
    import re

    assert re.search(why, need_of(Launch(command)).unknown or "")


def test_lack_of_free_memory_is_sure_and_small_cache_lack_not(need):
    assert need.on(device(0, 24, 9)).surely_not
    assert need.on(device(0, 12)).surely_not
    assert need.on(device(0, 24)) == Fitness(fits=True, has_margin=True)


def test_an_unsure_start_is_placed_on_an_empty_device_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    share = ("--gpu-memory-utilization", "0.25", "--max-model-len", "16384")
    need = need_of(Launch(("vllm", "serve", str(tmp_path), *share)))
    assert need.on(device(0, 80)) == Fitness(fits=True, has_margin=False)
    beside = need.on(device(0, 80, 40))
    assert (beside.fits, beside.surely_not) == (False, False)
    assert "is uncertain" in beside.reason


def test_devices_that_serve_equally_well_keep_their_order(need):
    assert chosen(need, device(2, 24), device(0, 24), device(1, 24)) == [2, 0, 1]
