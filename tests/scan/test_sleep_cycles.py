"""The sleeps of an engine in the logs of trainers: which was the first that kept memory, and who had it."""

from __future__ import annotations

import pytest

from oomguard.diagnosis import diagnose

WRAPPINGS = {
    "verl": ("(WorkerDict pid=4021, ip=10.0.0.7) ", "(WorkerDict pid=4021, ip=10.0.0.7) "),
    "verl in color": (
        "\x1b[36m(WorkerDict pid=4021)\x1b[0m ",
        "\x1b[36m(TaskRunner pid=3)\x1b[0m ",
    ),
    "NeMo-RL": ("(VllmGenerationWorker pid=812) ", "(DTensorPolicyWorker pid=900) "),
    "OpenRLHF": ("(LLMRayActor pid=5150) ", "(PolicyModelActor pid=5151) "),
    "slime": ("(RolloutRayActor pid=77) ", "(MegatronTrainRayActor pid=78) "),
    "TRL": ("[rank0]: ", "[rank0]: "),
    "none": ("", ""),
}
WAKE = """Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/vllm/device_allocator/cumem.py", line 227, in wake_up
    create_and_map(handle)
RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"""
STEP = """Traceback (most recent call last):
  File "/work/train.py", line 90, in step
    loss.backward()
  File "/env/lib/python3.12/site-packages/torch/_tensor.py", line 647, in backward
    torch.autograd.backward(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 4.10 GiB is free. Process 812 has 52.40 GiB memory in use. Including non-PyTorch memory, this process has 22.50 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."""


def log(sleeps: list[tuple[float, float]], failure: str, wrapping: str) -> str:
    engine, trainer = WRAPPINGS[wrapping]
    lines = []
    for freed, used in sleeps:
        lines.append(
            f"{engine}INFO 03-02 10:00:00 [gpu_worker.py:104] Sleep mode freed {freed:.2f} GiB "
            f"memory, {used:.2f} GiB memory is still in use."
        )
        lines.append(
            f"{engine}INFO 03-02 10:05:00 [executor_base.py:203] It took 0.8 seconds to wake up."
        )
    lines.pop()
    return "\n".join([*lines, *(trainer + line for line in failure.splitlines())]) + "\n"


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_first_sleep_that_kept_memory_is_named(wrapping):
    sleeps = [(61.2, 2.1), (61.2, 2.2), (40.9, 22.6), (20.0, 43.0)]
    for failure, phase in ((WAKE, "wake_up"), (STEP, "training")):
        incident = diagnose(log(sleeps, failure, wrapping)).first_cause
        assert (incident.phase, incident.causes[0].id) == (phase, "sleep_wake")
        assert incident.facts["sleep_residue_cycle"].value == 3
        assert incident.actions[0].id == "release_before_wake"
        assert "Sleep 3 was the first that did not release" in incident.causes[0].explanation


def test_memory_that_another_program_took_is_not_the_engines():
    sleeps = [(61.2, 2.1), (61.2, 2.1), (61.1, 30.5)]
    incident = diagnose(log(sleeps, WAKE, "none")).first_cause
    assert incident.facts["sleep_kept_by_engine"].value is False
    assert "Since sleep 3 another program uses more" in incident.causes[0].explanation


def test_a_sleep_that_frees_nothing_is_the_first(tmp_path):
    incident = diagnose(log([(0.0, 63.1)], STEP, "TRL")).first_cause
    assert incident.facts["sleep_residue_cycle"].value == 1
    assert incident.causes[0].id == "sleep_wake"


def test_a_trainer_next_to_a_good_sleeper_is_its_own_cause():
    incident = diagnose(log([(61.2, 2.1)] * 4, STEP, "verl")).first_cause
    assert "sleep_residue_cycle" not in incident.facts
    assert incident.causes[0].id != "sleep_wake"


def slept(clock, freed, used, engine=""):
    return f"{engine}INFO 03-02 {clock} [gpu_worker.py:104] Sleep mode freed {freed:.2f} GiB memory, {used:.2f} GiB memory is still in use."


def test_two_ranks_that_sleep_at_one_moment_are_one_sleep():
    awake = "INFO 03-02 10:00:30 [abstract.py:324] It took 0.6 seconds to wake up."
    ranks = [slept("10:00:00", 60, 2.5), slept("10:00:01", 60, 3.5)]
    later = [slept("10:05:00", 60, 9.0), slept("10:05:00", 60, 8.0)]
    incident = diagnose("\n".join([*ranks, awake, *later, WAKE])).first_cause
    assert incident.facts["sleep_cycles"].value == 2
    assert incident.facts["sleep_used_each"].value == "3.50, 9.00"


def test_a_residue_that_grows_without_a_trainer_is_the_engines():
    engine = "(EngineCore pid=88) "
    lines = []
    for hour, used in enumerate((0.4, 1.1, 2.2, 3.6, 5.1)):
        lines.append(slept(f"1{hour}:00:00", 1.9, used, engine))
        lines.append(
            f"{engine}INFO 03-02 1{hour}:05:00 [abstract.py:324] It took 0.2 seconds to wake up."
        )
    incident = diagnose(
        "\n".join([*lines[:-1], *(engine + one for one in WAKE.splitlines())])
    ).first_cause
    assert incident.actions[0].title.startswith("Restart the engine")
    assert "It failed after sleep 5" in incident.causes[0].explanation
    assert "0.40, 1.10, 2.20, 3.60, 5.10 GiB" in incident.causes[0].explanation


LISTS = {
    "csv": "pid, process_name, used_gpu_memory [MiB]\n31, VLLM::EngineCore, 1200 MiB\n900, {name}, 30720 MiB",
    "table": "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n|        ID   ID                                                               Usage      |\n|===|\n"
    "|    0   N/A  N/A              31      C   VLLM::EngineCore                       1200MiB |\n|    0   N/A  N/A             900      C   {name}              30720MiB |",
}


def test_nvidia_smi_names_who_has_the_memory():
    engine = "(EngineCore pid=31) "
    wake = [engine + line for line in WAKE.splitlines()]
    for shape in LISTS.values():
        for name, kind, title in (
            (
                "VLLM::Worker",
                "engine",
                "Put the other engine to sleep, or stop it: VLLM::Worker (PID 900)",
            ),
            ("/srv/render/bin/python", "other", "Stop /srv/render/bin/python (PID 900)"),
        ):
            listed = shape.format(name=name)
            for log in (
                [slept("10:00:00", 60, 1.2, engine), *wake, listed],
                [listed, slept("10:00:00", 60, 1.2, engine), *wake],
            ):
                incident = diagnose("\n".join(log)).first_cause
                assert incident.facts["device_holder"].value == kind
                assert incident.causes[0].id == "colocated_process"
                assert incident.actions[0].title.startswith(title)
                assert "30.00 GiB" in incident.causes[0].explanation


FLAGS = {
    '  File "/env/verl/workers/fsdp_workers.py", line 4, in rollout_mode': "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    '  File "/env/verl/workers/megatron_workers.py", line 4, in rollout_mode': "actor_rollout_ref.actor.megatron.optimizer_offload=True",
    '  File "/env/openrlhf/trainer/ray/vllm_engine.py", line 4, in wake_up': "--deepspeed_enable_sleep",
    '  File "/env/nemo_rl/algorithms/grpo.py", line 4, in grpo_train': "policy.dtensor_cfg.cpu_offload=true",
    '  File "/env/trl/trainer/grpo_trainer.py", line 4, in _generate': "zero3_offload",
    '  File "/env/swift/trainers/rlhf_trainer/rollout.py", line 4, in infer': "--offload_optimizer true",
    '  File "/env/unsloth_compiled_cache/UnslothGRPOTrainer.py", line 4, in infer': "paged_adamw_8bit",
}


def test_each_trainers_own_flags_are_advised():
    for frame, flag in FLAGS.items():
        lines = WAKE.splitlines()
        text = "\n".join([slept("10:00:00", 60, 21.2), lines[0], frame, *lines[1:]])
        incident = diagnose(text).first_cause
        assert incident.causes[0].rule == "OG387"
        assert flag in incident.actions[0].command
    offloads = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.actor.fsdp_config.param_offload=True"
    )
    incident = diagnose("\n".join([offloads, text])).first_cause
    assert incident.actions[0].id == "gpu_memory_utilization"


def test_slimes_trainer_that_waits_for_sglang_is_no_training_step():
    trainer = "(MegatronTrainRayActor pid=78) "
    incident = diagnose(
        '(SGLangEngine pid=77) [2026-03-02 10:00:00] INFO:     10.0.0.4:51330 - "POST /release_memory_occupation HTTP/1.1" 200 OK\n'
        f"{trainer}[2026-03-02 10:00:01] memory_utils.py:34 - [Rank 0] Memory-Usage before wake_up model: {{'gpu': '0', 'total_GB': 80.0, 'free_GB': 20.0, 'used_GB': 60.0}}\n"
        f"{trainer}[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=103"
    ).first_cause
    assert (incident.causes[0].rule, incident.causes[0].id) == ("OG394", "sleep_wake")
    assert "60.00 GiB of the device was in use" in incident.causes[0].explanation


def test_the_host_runs_out_of_memory_for_sleeping_engines():
    killed = "[Tue Apr 15 16:33:02 2025] Out of memory: Killed process 2014 (python3) total-vm:161240136kB, anon-rss:5312044kB, file-rss:71220kB, shmem-rss:58920112kB, UID:0 pgtables:131072kB oom_score_adj:0"
    incident = diagnose("\n".join([slept("10:00:00", 60, 1.2), killed])).first_cause
    assert (incident.causes[0].rule, incident.actions[0].id) == ("OG414", "less_host_memory")
    assert "sleep?level=2" in incident.actions[0].command
    second = diagnose(
        "\n".join(['"POST /sleep?level=2 HTTP/1.1" 200', slept("10:00:00", 60, 1.2), killed])
    )
    assert second.first_cause.causes[0].rule == "OG409"
    frames = 'Traceback (most recent call last):\n  File "/env/vllm/device_allocator/cumem.py", line 196, in sleep\n    cpu_backup_tensor = torch.empty(\nRuntimeError: CUDA error: out of memory'
    incident = diagnose(frames).first_cause
    assert (incident.causes[0].rule, incident.actions[0].id) == ("OG392", "less_host_memory")
    assert "gpu_memory_utilization" not in {action.id for action in incident.actions}


def test_gathering_a_loras_base_weights_is_named():
    incident = diagnose(
        "\n".join(
            [
                slept("10:00:00", 27, 14.4),
                "INFO 03-02 10:02:00 [abstract.py:324] It took 1.0 seconds to wake up tags ['weights'].",
                "Traceback (most recent call last):",
                '  File "/env/verl/workers/sharding_manager/fsdp_vllm.py", line 131, in __collect_lora_params',
                "    with FSDP.summon_full_params(self.module, writeback=False):",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.27 GiB. GPU 0 has a total capacity of 44.52 GiB of which 9.87 GiB is free.",
            ]
        )
    ).first_cause
    assert incident.causes[0].rule == "OG393"
    assert "layered_summon=True" in incident.actions[0].command


def test_a_step_next_to_a_sleeping_engine_is_the_trainers():
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.10 GiB is free. Including non-PyTorch memory, this process has 75.99 GiB memory in use."
    frame = '  File "/env/openrlhf/trainer/ppo_trainer.py", line 9, in make_experience'
    incident = diagnose("\n".join([slept("10:00:00", 60, 2.2), frame, oom])).first_cause
    assert incident.causes[0].id == "training"
    assert "--micro_train_batch_size" in incident.actions[0].command
    assert "gpu_memory_utilization" not in {action.id for action in incident.actions}


def test_a_wake_up_that_fails_alone_says_how_to_find_who_has_the_memory():
    engine = "(EngineCore pid=31) "
    words = "ERROR 09-02 20:14:20 [core.py:1210] Invocation of wake_up method failed"
    log = [slept("10:00:00", 60, 1.2, engine), engine + words, engine + WAKE.splitlines()[-1]]
    incident = diagnose("\n".join(log)).first_cause
    assert incident.phase == "wake_up"
    assert incident.actions[0].command.startswith("nvidia-smi")
