"""oomguard.place: devices of their own for several programs, or an error that names the conflict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.placing import Gpus, simulated_gpus

GIB = 2**30
ASK = """
import json, sys, oomguard
wanted = json.load(sys.stdin)
try:
    found = oomguard.place(wanted)
    print(json.dumps({name: [one.indices, one.visible, one.env] for name, one in found.items()}))
except oomguard.OomguardError as error:
    print(json.dumps([type(error).__name__, str(error), error.hint]))
"""


def place(gpus: Gpus, wanted: Any, **env: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(wanted),
        env={**os.environ, **gpus.env, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_each_program_gets_its_own_devices_and_variables(gpus):
    found = place(gpus, {"serve": 2, "extract": 2})
    assert found["serve"] == [
        [0, 1],
        "0,1",
        {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ]
    assert found["extract"][0] == [2, 3]


def test_devices_that_nobody_uses_are_given_first(gpus):
    simulated_gpus.take(gpus.folder, os.getpid(), {simulated_gpus.uuid(0): 9 * GIB})
    assert place(gpus, {"serve": 3, "extract": 1})["extract"][0] == [0]


def test_named_devices_stay_and_others_come_from_the_rest(gpus):
    found = place(gpus, {"extract": 2, "serve": [1, 0]})
    assert (found["serve"][1], found["extract"][0]) == ("1,0", [2, 3])


def test_a_device_that_two_programs_name_is_the_conflict(gpus):
    kind, text, hint = place(gpus, {"serve": [0, 1], "extract": [1, 2]})
    assert kind == "PlacementError"
    assert "'serve' and 'extract' both name device 1" in text
    assert "run them one after the other" in hint


def test_too_few_devices_name_each_wish_and_how_to_take_turns(gpus):
    kind, text, hint = place(gpus, {"serve": 4, "extract": 4})
    assert kind == "PlacementError"
    assert text == "4 too few: 'serve' wants 4, 'extract' wants 4, but there are 4 (0, 1, 2, 3)"
    assert "oomguard run --gpus 4 --wait 1h" in hint


def test_what_the_variable_hides_is_given_to_nobody_and_said(gpus):
    _, text, _ = place(gpus, {"serve": 2, "extract": 1}, CUDA_VISIBLE_DEVICES="0,1")
    assert "1 too few" in text
    assert "CUDA_VISIBLE_DEVICES=0,1 hides GPU 2, GPU 3" in text


@pytest.mark.parametrize(
    "wanted",
    [
        {"serve": 0},
        {"serve": -1},
        {"serve": True},
        {"serve": []},
        {"serve": "0,1"},
        {"serve": [1, 1]},
    ],
)
def test_what_is_no_number_of_devices_is_a_mistake(gpus, wanted):
    assert place(gpus, wanted)[0] == "UsageError"


@pytest.mark.parametrize("wanted", [None, ["serve", 2], "serve", 2])
def test_what_names_no_program_is_a_mistake_with_how_to_ask(gpus, wanted):
    kind, _, hint = place(gpus, wanted)
    assert kind == "SettingError"
    assert '{"serve": 4}' in hint


def test_a_named_device_that_fell_off_is_not_there(gpus):
    gpus.are(simulated_gpus.line(0), simulated_gpus.line(1, more="lost"))
    kind, text, _ = place(gpus, {"serve": [1]})
    assert (kind, text) == (
        "PlacementError",
        "'serve' names device 1, but there is 1 (0)",
    )


def test_nobody_is_placed_where_nvml_does_not_answer(gpus):
    gpus.are("fails init 9")
    kind, text, _ = place(gpus, {"serve": 1})
    assert kind == "PlacementError"
    assert "NVML does not answer" in text


def test_the_order_of_the_user_s_variable_is_kept(gpus):
    found = place(gpus, {"serve": 1, "extract": 2}, CUDA_VISIBLE_DEVICES="3,0,1")
    assert (found["serve"][1], found["extract"][1]) == ("3", "0,1")
