"""A Ray job of ranks: four actors, each of which runs its rank under ``oomguard run``; they agree through Ray's key-value store."""

import json
import os
import socket
import subprocess
import sys

import ray


@ray.remote(num_cpus=1)
class Rank:
    """One rank of the job, as Ray Train places it: an actor with the job's variables."""

    def address(self) -> tuple[str, int]:
        """Return where the ranks of torch.distributed can meet."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(free.getsockname()[1])

    def run(self, command: list[str], env: dict[str, str]) -> tuple[int, str]:
        """Run a command in the actor's process group; return its status and what it printed."""
        ran = subprocess.run(
            command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return ran.returncode, ran.stdout


def main() -> None:
    """Run each rank's command, given as JSON by rank; print status and output of each."""
    asked = json.loads(sys.stdin.read())
    ray.init(address=asked["address"], log_to_driver=False, logging_level="error")
    actors = [Rank.remote() for _ in asked["commands"]]
    address, port = ray.get(actors[0].address.remote())
    size = len(actors)
    told = [
        actor.run.remote(
            command,
            {
                **asked["env"],
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            },
        )
        for rank, (actor, command) in enumerate(zip(actors, asked["commands"], strict=True))
    ]
    json.dump(ray.get(told), sys.stdout)


if __name__ == "__main__":
    main()
