"""Which rank of a job a command is by its own flags."""

from __future__ import annotations

import shlex

from oomguard.engines.command import Launch
from oomguard.engines.devices import ranks_in_command


def told(line: str) -> dict[str, object] | None:
    return ranks_in_command(Launch(tuple(shlex.split(line))))


def test_a_head_and_its_headless_hosts_are_ranks_of_one_job(subtests):
    for name, line, rank in [
        (
            "head",
            "vllm serve m --data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-address head",
            0,
        ),
        (
            "headless",
            "vllm serve m --headless -dp 4 -dpl 2 --data-parallel-start-rank 2 --data-parallel-address=head",
            1,
        ),
        (
            "wrapped",
            "env A=1 vllm serve m --headless --data_parallel_size=4 -dpl 2 -dpr 2 -dpa head",
            1,
        ),
    ]:
        with subtests.test(name):
            found = told(line)
            assert (found["rank"], found["size"], found["address"], found["port"]) == (
                rank,
                2,
                "head",
                29550,
            )


def test_hosts_of_one_engine_are_ranks_of_one_job():
    found = told("vllm serve m --nnodes 2 --node-rank 1 --master-addr head --master-port 7000")
    assert (found["rank"], found["size"], found["address"], found["port"]) == (1, 2, "head", 7000)


def test_replicas_and_other_programs_on_a_host_are_no_ranks(subtests):
    for line in [
        "vllm serve m",
        "vllm serve m --data-parallel-size 4",
        "vllm serve m --data-parallel-size 4 --data-parallel-size-local 4",
        "vllm serve m --data-parallel-size 4 --data-parallel-rank 1",
        "vllm serve m --data-parallel-size 4 --data-parallel-size-local 3",
        "vllm serve m --nnodes 1 --node-rank 0",
        "vllm serve m --nnodes two --node-rank 1",
        "python job.py --nnodes 2 --node-rank 1",
    ]:
        with subtests.test(line=line):
            assert told(line) is None
