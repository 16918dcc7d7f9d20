"""Which rank a process is, as each launcher tells it, and what is no job of ranks."""

from __future__ import annotations

from oomguard.cluster.ranks.rendezvous import detect_rank
from support.each import each

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
}


def test_torchrun_gives_rank_hosts_and_the_agents_store():
    own = detect_rank(TORCHRUN)
    assert (own.rank, own.size, own.launcher, own.local_rank, own.is_on_one_host) == (
        2,
        4,
        "torchrun",
        0,
        False,
    )
    assert (own.address, own.port, own.keeps_store) == ("node-1", 29500, True)


def test_all_ranks_of_one_agent_are_on_one_host():
    assert detect_rank(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).is_on_one_host


def test_a_restart_by_the_agent_is_another_meeting():
    again = detect_rank(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.job != detect_rank(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"}).job


def test_srun_tasks_with_a_torch_address_are_ranks_of_one_job():
    own = detect_rank(SRUN | {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"})
    assert (own.rank, own.size, own.launcher) == (1, 2, "srun")
    assert detect_rank(SRUN) is None


@each("environ", [SRUN, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}])
def test_without_one_they_are_where_the_user_says_so(environ):
    assert detect_rank(environ) is None
    own = detect_rank(environ, is_one_job=True)
    assert (own.rank, own.size, own.address) == (1, 2, None)


def test_a_batch_script_of_slurm_is_no_rank():
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert detect_rank(script | {"MASTER_ADDR": "node-1", "SLURM_NTASKS": "4"}) is None


@each(
    "changed",
    [
        {"WORLD_SIZE": "1"},
        {"RANK": "4"},
        {"RANK": "-1"},
        {"RANK": "two"},
        {"WORLD_SIZE": ""},
        {"RANK": "²"},
    ],
)
def test_what_names_no_rank_of_several_is_none(changed):
    assert detect_rank(TORCHRUN | changed) is None


def test_an_empty_environment_is_no_rank():
    assert detect_rank({}) is None


@each(
    ("address", "is_one"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.7", False)],
)
def test_an_address_of_this_host_alone_means_one_host(address, is_one):
    own = detect_rank({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "1"})
    assert own.is_on_one_host is is_one
