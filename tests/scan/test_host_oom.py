"""A failure of the host's memory says the limit, who had most and who was ended; none of its numbers is a device's."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB
from oomguard.core.incident import Incident
from oomguard.diagnosis import diagnose

_OF_DEVICE = {
    "device_total_bytes",
    "device_free_bytes",
    "process_in_use_bytes",
    "own_bytes",
    "allocated_bytes",
}


def _only(log: str) -> Incident:
    (incident,) = diagnose(log).incidents
    assert incident.kind == "host_oom"
    assert incident.causes[0].id == "host_ram"
    assert not _OF_DEVICE & incident.facts.keys()
    assert incident.budget.parts == ()
    assert "unknown" not in incident.causes[0].explanation
    return incident


def _facts(incident: Incident) -> dict[str, object]:
    named = {name: fact.value for name, fact in incident.facts.items() if name.startswith("host_")}
    return {
        name: round(v / GIB, 2) if name.endswith("_bytes") and isinstance(v, int) else v
        for name, v in named.items()
    }


KERNEL = """\
[70001.100] data-prep invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, oom_score_adj=0
[70001.101] memory: usage 50331648kB, limit 50331648kB, failcnt 3312
[70001.102] Tasks state (memory values in pages):
[70001.102] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[70001.103] [    901]  1000   901      610      221    45056        0             0 bash
[70001.104] [    955]  1000   955  4100000  2621440  9000000        0             0 python3
[70001.105] [    987]  1000   987 19100000  9437184 80000000        0             0 data-prep
[70001.106] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/job,task_memcg=/job/w,task=python3,pid=955,uid=1000
[70001.107] Memory cgroup out of memory: Killed process 955 (python3) total-vm:16400000kB, anon-rss:10485760kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:9000kB oom_score_adj:0
[70001.300] oom_reaper: reaped process 955 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""

# The same on a node without limits, which says what it has.
NODE = (
    KERNEL.replace(
        "[70001.101] memory: usage 50331648kB, limit 50331648kB, failcnt 3312",
        "[70001.101] 16777216 pages RAM",
    )
    .replace(
        "CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/job",
        "CONSTRAINT_NONE,nodemask=(null),global_oom",
    )
    .replace("Memory cgroup out of memory", "Out of memory")
)

DESCRIBE = """\
    State:          Waiting
      Reason:       CrashLoopBackOff
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
      Started:      Mon, 04 May 2026 10:00:00 +0000
      Finished:     Mon, 04 May 2026 10:03:10 +0000
    Ready:          False
    Restart Count:  6
    Limits:
      cpu:             12
      memory:          24Gi
      nvidia.com/gpu:  1
    Requests:
      cpu:             4
      memory:          8Gi
"""

POD_YAML = """\
spec:
  containers:
  - name: server
    resources:
      limits:
        memory: 40Gi
        nvidia.com/gpu: "2"
      requests:
        memory: 16Gi
status:
  containerStatuses:
  - lastState:
      terminated:
        exitCode: 137
        reason: OOMKilled
    name: server
"""

POD_JSON = """\
{"state":{"waiting":{"reason":"CrashLoopBackOff"}},"lastState":{"terminated":{"exitCode":137,"reason":"OOMKilled"}},\
"resources":{"limits":{"cpu":"8","memory":"20Gi"},"requests":{"memory":"4Gi"}}}
"""

INSPECT = """\
        "State": {
            "Status": "exited",
            "OOMKilled": true,
            "ExitCode": 137
        },
        "HostConfig": {
            "Memory": 12884901888,
            "MemorySwap": 12884901888,
"""

RAY = """\
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
Memory on the node (IP: 10.2.0.4, ID: 0c0c) where the task (actor ID: 0d0d, name=Engine.__init__, pid=41, memory used=3.75GB) was running was 244.00GB / 256.00GB (0.953125), which exceeds the memory usage threshold of 0.95. Ray killed this worker (ID: 0e0e) because it was the most recently scheduled task; to see more information about memory usage on this node, use `ray logs raylet.out -ip 10.2.0.4`. Top 10 memory users:
PID	MEM(GB)	COMMAND
17	201.25	python tokenize_all.py --jobs 64
41	3.75	ray::Engine.__init__
"""

SLURM = """\
slurmstepd: error: Detected 1 oom_kill event in StepId=4411.0. Some of the step tasks have been OOM Killed.
srun: error: gpu03: task 0: Out Of Memory
"""

LOADER = """\
Traceback (most recent call last):
  File "/srv/train/evaluate.py", line 40, in <module>
    for batch in loader:
  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 701, in __next__
    data = self._next_data()
RuntimeError: DataLoader worker (pid 3190) is killed by signal: Killed.
"""

COMPILE = """\
FAILED: csrc/flash_fwd_hdim256.o
nvcc error   : 'cicc' died due to signal 9 (Kill signal)
ninja: build stopped: subcommand failed.
"""

SHARDS = """\
Loading checkpoint shards:  33%|###3      | 3/9 [00:21<00:42,  7.10s/it]Killed
[ 512.000100] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=python,pid=611,uid=1000
[ 512.000200] Out of memory: Killed process 611 (python) total-vm:90000000kB, anon-rss:41943040kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:90000kB oom_score_adj:0
"""

OFFLOAD = """\
INFO 05-04 10:00:00 [utils.py:253] non-default args: {'model': 'org/big-model', 'cpu_offload_gb': 60.0}
RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)
"""

MMAP = "RuntimeError: unable to mmap 5368709120 bytes from file </models/m/model-00002-of-00004.safetensors>: Cannot allocate memory (12)\n"


@pytest.mark.parametrize(
    ("log", "rule", "facts"),
    [
        (
            KERNEL,
            "OG408",
            {
                "host_scope": "limit",
                "host_limit_bytes": 48.0,
                "host_next_limit": "72",
                "host_holder": "data-prep",
                "host_holder_bytes": 36.0,
                "host_victim": "python3",
                "host_victim_bytes": 10.0,
            },
        ),
        (
            NODE,
            "OG409",
            {
                "host_scope": "node",
                "host_total_bytes": 64.0,
                "host_holder": "data-prep",
                "host_holder_bytes": 36.0,
                "host_victim": "python3",
                "host_victim_bytes": 10.0,
            },
        ),
        (
            DESCRIBE,
            "OG408",
            {
                "host_scope": "limit",
                "host_limit_bytes": 24.0,
                "host_requested_bytes": 8.0,
                "host_manager": "kubernetes",
                "host_next_limit": "36",
            },
        ),
        (
            POD_YAML,
            "OG408",
            {
                "host_scope": "limit",
                "host_limit_bytes": 40.0,
                "host_requested_bytes": 16.0,
                "host_manager": "kubernetes",
                "host_next_limit": "60",
            },
        ),
        (
            POD_JSON,
            "OG408",
            {
                "host_scope": "limit",
                "host_limit_bytes": 20.0,
                "host_requested_bytes": 4.0,
                "host_manager": "kubernetes",
                "host_next_limit": "30",
            },
        ),
        (
            INSPECT,
            "OG408",
            {
                "host_scope": "limit",
                "host_limit_bytes": 12.0,
                "host_manager": "docker",
                "host_next_limit": "18",
            },
        ),
        (
            RAY,
            "OG409",
            {
                "host_scope": "node",
                "host_manager": "ray",
                "host_used_bytes": 244.0,
                "host_total_bytes": 256.0,
                "host_victim": "Engine.__init__",
                "host_victim_bytes": 3.75,
                "host_holder": "python tokenize_all.py",
                "host_holder_bytes": 201.25,
            },
        ),
        (SLURM, "OG408", {"host_scope": "limit", "host_manager": "slurm"}),
        (LOADER, "OG406", {"host_phase": "data_loader"}),
        (COMPILE, "OG407", {"host_phase": "compile", "host_victim": "cicc"}),
        (
            SHARDS,
            "OG405",
            {
                "host_phase": "load_weights",
                "host_scope": "node",
                "host_victim": "python",
                "host_victim_bytes": 40.0,
            },
        ),
        (OFFLOAD, "OG410", {"host_offload": True}),
        (MMAP, "OG405", {"host_phase": "load_weights"}),
    ],
    ids=[
        "kernel",
        "node",
        "describe",
        "yaml",
        "json",
        "inspect",
        "ray",
        "slurm",
        "loader",
        "compile",
        "shards",
        "offload",
        "mmap",
    ],
)
def test_the_situation_is_recognized_with_its_numbers(log, rule, facts):
    incident = _only(log)

    assert incident.causes[0].rule == rule
    assert _facts(incident) == facts


def test_explanation_names_limit_largest_user_and_victim():
    text = _only(KERNEL).causes[0].explanation

    assert (
        "The limit was 48.00 GiB. data-prep had the most, 36.00 GiB. python3 was ended with 10.00 GiB."
        in text
    )


def test_the_headline_says_what_is_known():
    assert _only(RAY).headline == "Host memory ran out: 244.00 GiB of 256.00 GiB in use"
    assert _only(DESCRIBE).headline == "Host memory ran out: the limit was 24.00 GiB"


def test_a_process_that_has_loaded_its_weights_was_not_loading():
    loaded = SHARDS.replace(
        "33%|###3      | 3/9 [00:21<00:42,  7.10s/it]Killed", "100%|##########| 9/9 [01:10<00:00]"
    )

    incident = _only(loaded)

    assert incident.causes[0].rule == "OG409"
    assert incident.phase == "unknown"


def test_the_kernel_s_word_may_come_before_the_shell_s():
    first, *kernel = SHARDS.splitlines(keepends=True)

    assert _only("".join([*kernel, first])).causes[0].rule == "OG405"


def test_a_limit_beside_a_device_s_failure_is_no_part_of_it():
    log = f"{POD_YAML.replace('OOMKilled', 'Error')}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\n"

    (incident,) = diagnose(log).incidents

    assert incident.kind == "cuda_oom"
    assert not [name for name in incident.facts if name.startswith("host_")]


def test_a_table_of_another_time_names_nobody():
    table, end = KERNEL.split("[70001.106]")
    log = table.split("\n", 2)[2] + "all is well\n" * 900 + f"[70001.106]{end}"

    incidents = diagnose(log).incidents

    assert "host_holder" not in incidents[-1].facts


def test_a_process_of_a_later_kernel_has_its_columns():
    row = "[ 3.2] [   7001]  1000   7001 52000000 26214400 26000000 200000 14400 300000000 0 0 python train eval\n"
    log = KERNEL.replace("[70001.104]", row + "[70001.104]")

    assert _facts(_only(log))["host_holder"] == "python train eval"
    assert _facts(_only(log))["host_holder_bytes"] == 100.0


DESCRIBED_POD = """Name:             {pod}
Namespace:        assistants
Containers:
  proxy:
    Image:         registry/proxy:3
    State:          Running
    Ready:          True
    Restart Count:  0
    Environment:    <none>
    Mounts:         <none>
  engine:
    Image:         registry/engine:7
    Args:
      --swap-space=6
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
    Limits:
      memory:          21Gi
    Requests:
      memory:          8Gi
"""


def first_actions(log: str) -> list[tuple[str, str | None]]:
    incident = diagnose(log).first_cause
    return [(action.title, action.command) for action in incident.actions]


def test_a_killed_pod_gets_its_names_and_a_larger_limit():
    workloads = {
        "chat-5c9d7b46f8-q7m2z": "deployment/chat",
        "chat-shard-12": "statefulset/chat-shard",
    }
    for pod, workload in workloads.items():
        (title, command), (less, _) = first_actions(DESCRIBED_POD.format(pod=pod))[:2]
        assert title == "Raise the container's memory limit above 21.00 GiB: try 32 GiB"
        expected = f"kubectl -n assistants set resources {workload} -c engine"
        assert command == f"{expected} --limits=memory=32Gi"
        assert less == "Lower vLLM's --swap-space, now 6.00 GiB for each GPU"


def test_a_placeholder_of_a_killed_pod_is_explained():
    limit_only = DESCRIBED_POD.partition("  engine:")[2]
    _, command = first_actions(limit_only)[0]
    expected = "kubectl set resources deployment/NAME --limits=memory=32Gi"
    assert command == f"{expected} # the log does not show NAME"
