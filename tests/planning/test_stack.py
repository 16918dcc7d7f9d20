"""Several services on the GPUs of a machine: where each goes, its share, and what has no place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from packaging.version import Version

from oomguard.core.errors import UsageError
from oomguard.core.facts import GIB
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.start import VllmSettings
from oomguard.planning.stack import StackGpu, plan_stack
from oomguard.planning.start import StartRequest
from support.small_llama import CONFIG

MODEL = read_model(ModelFiles("model", "config.json", CONFIG, None))
LARGE = read_model(ModelFiles("large", "config.json", CONFIG | {"num_hidden_layers": 130}, None))


def start(model=MODEL, given=frozenset(), **changes):
    def start_on(gpu):
        settings = VllmSettings(Version("0.31"), gpu.total_bytes, 0.9, gpu_name=gpu.name)
        return StartRequest(model.name, model, replace(settings, **changes), given)

    return start_on


def gpus(*sizes):
    return [StackGpu(number, size * GIB) for number, size in enumerate(sizes)]


def test_services_share_a_gpu_and_none_takes_what_another_has():
    found = plan_stack(gpus(24), {"a": start(), "b": start(max_model_len=2048)})
    needed = sum(service.needed_bytes for service in found.services)

    assert found.fit == "yes"
    assert needed < 24 * GIB
    assert found.free_bytes == (24 * GIB - needed,)
    assert all(service.budget.fit == "yes" for service in found.services)


def test_the_largest_service_starts_first_and_gets_a_gpu_of_its_own():
    found = plan_stack(gpus(24, 24), {"a": start(), "b": start(), "large": start(LARGE)})
    where = {service.name: service.gpus for service in found.services}

    assert found.services[0].name == "large"
    assert where["a"] == where["b"] != where["large"]


def test_ranks_of_one_service_are_on_different_gpus():
    found = plan_stack(gpus(24, 24), {"two": start(LARGE, tensor_parallel_size=2)})
    assert found.services[0].gpus == (0, 1)
    alone = plan_stack(gpus(24), {"two": start(LARGE, tensor_parallel_size=2)})
    assert alone.fit == "no"


def test_a_service_without_a_place_is_named_and_the_others_are_placed():
    found = plan_stack(gpus(24), {"a": start(), "large": start(LARGE)})
    assert (found.fit, list(found.missing)) == ("no", ["large"])
    assert [service.name for service in found.services] == ["a"]

    too_large = plan_stack(gpus(8), {"large": start(LARGE)})
    assert "nothing is left for the KV cache" in too_large.missing["large"]


def test_a_given_share_stays():
    found = plan_stack(gpus(24), {"a": start(given=frozenset({"gpu_memory_utilization"}))})
    assert found.services[0].request.settings.gpu_memory_utilization == 0.9


def test_a_stack_without_gpus_or_services_is_refused():
    for machine, services in [([], {"a": start()}), (gpus(24), {})]:
        with pytest.raises(UsageError, match="a stack needs a GPU"):
            plan_stack(machine, services)


def plan(*words):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "oomguard", "plan", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.fixture
def stack(tmp_path):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    path = tmp_path / "stack.yaml"
    path.write_text(
        "engine_version: 0.31.0\n"
        "gpus: [{memory: 24GiB, count: 2}]\n"
        "services:\n"
        f"  chat: vllm serve {model} --max-model-len 4096 --port 8000\n"
        f"  draft: {model} --max-model-len 2048\n"
    )
    return path


def test_the_file_of_a_stack_becomes_commands(stack):
    text = plan(str(stack), "--exit-code")
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.startswith("fits: 2 of 2 services")
    commands = [line for line in text.stdout.splitlines() if line.startswith("CUDA_VISIBLE")]
    assert len(commands) == 2
    assert "--max-model-len 4096" in commands[0]
    assert commands[0].endswith("--port 8000")

    record = json.loads(plan(str(stack), "--format", "json").stdout)
    assert record["fit"] == "yes"
    assert [service["command"] for service in record["services"]] == commands


def test_a_wrong_file_of_a_stack_is_refused_in_one_message(stack, subtests):
    for text, message in [
        ("services: [", "is not YAML"),
        ("gpus: []", "has no services by name"),
        ("services: {a: m}\nports: 1", "unknown key ports"),
        ("services: {a: 3}\ngpus: [{memory: 24GiB}]", "names no model"),
        ("services: {a: m}\ngpus: [{memory: 24}]", "without a unit"),
        ("services: {a: m}\ngpus: [{memory: 24GiB, count: 0}]", "count is 0"),
        ("services: {a: no-such-folder}\ngpus: [{memory: 24GiB}]", "no such folder"),
    ]:
        with subtests.test(text=text):
            stack.write_text(text)
            ran = plan(str(stack))
            assert (ran.returncode, ran.stdout) == (2, "")
            assert message in ran.stderr
            assert "Traceback" not in ran.stderr
