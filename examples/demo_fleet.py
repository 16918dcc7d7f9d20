"""Relaunch a job of four ranks on two Ray nodes after one rank fails, then summarize its logs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
HERE = Path(__file__).parent
RANKS = 4
NARROW = 2
ROOM_TOKENS = 1792
OOMGUARD = [sys.executable, "-m", "oomguard"]


def run_job(address: str, folder: Path) -> list[tuple[str, int]]:
    """Run four ranks as actors, two per node, each with its own log.

    Returns:
        The node and the exit status of each rank.
    """
    import ray

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    class Rank:
        def run(self, rank: int, command: list[str], env: dict[str, str]) -> tuple[str, int]:
            """Run one rank's command."""
            with (folder / "logs" / f"slurm-812_{rank}.out").open("w") as log:
                status = subprocess.run(
                    command, env=os.environ | env, stdout=log, stderr=log, check=False
                ).returncode
            return ray.get_runtime_context().get_node_id()[:6], status

    ray.init(address=address, log_to_driver=False, logging_level="error")
    run = [
        *OOMGUARD,
        "run",
        "-q",
        "--no-pty",
        "--report",
        str(folder / "report.md"),
        "--rendezvous",
        f"ray://{address}",
        "--journal",
        str(folder / "journal.sqlite3"),
    ]
    pending = []
    for rank in range(RANKS):
        if rank == NARROW:
            room = ROOM_TOKENS
        else:
            room = 1 << 20
        job = [sys.executable, str(HERE / "demo_fleet_rank.py"), str(room), str(folder / "steps")]
        command = [*run, "--rank", str(rank), "--world-size", str(RANKS), "--", *job]
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        pending.append(Rank.remote().run.remote(rank, command, env))
    ended: list[tuple[str, int]] = ray.get(pending)
    ray.shutdown()
    return ended


def main() -> int:
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        print(
            "The demo needs Ray. Install oomguard's extra ray: pip install '.[ray]'",
            file=sys.stderr,
        )
        return 2
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("logs", "steps"):
            (folder / part).mkdir()
        console.rule("1. Two nodes of Ray on this machine")
        node: dict[str, Any] = {"num_cpus": RANKS // 2}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(**node)
            cluster.wait_for_nodes()
            console.rule(
                f"2. A job of {RANKS} ranks: rank {NARROW} has room for {ROOM_TOKENS} tokens, all "
                "ask for 32768"
            )
            ended = run_job(cluster.address, folder)
            console.print(
                "$ oomguard run --report report.md -- python rank.py    # on each rank",
                style="bold",
            )
            console.print(Markdown((folder / "report.md").read_text()))
            for rank, (where, status) in enumerate(ended):
                console.print(f"  rank {rank} on node {where}: exit status {status}", markup=False)
            console.rule("3. What failed, over all logs, read by the cluster's workers")
            console.print("$ oomguard diagnose --on ray --summary logs", style="bold")
            env = os.environ | {"RAY_ADDRESS": cluster.address}
            words = [*OOMGUARD, "diagnose", "--on", "ray", "--summary", "logs"]
            summary = subprocess.run(words, cwd=folder, env=env, check=False).returncode
        finally:
            cluster.shutdown()
        console.rule("4. One record of it")
        console.print("$ oomguard history", style="bold")
        subprocess.run(
            [*OOMGUARD, "history", "--journal", str(folder / "journal.sqlite3")], check=False
        )
    worked = sum(status == 0 for _, status in ended)
    console.rule(f"{worked} of {RANKS} ranks ran after one change")
    if worked == RANKS and not summary:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
