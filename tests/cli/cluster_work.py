"""What ``test_cluster.py`` tells of: ``diagnose --on ray`` on a local cluster, run once; the folder of logs is the argument."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv


def diagnose(address: str | None, *arguments: str, **variables: str) -> dict[str, Any]:
    env = {**os.environ, **({"RAY_ADDRESS": address} if address else {}), **variables}
    command = [sys.executable, "-m", "oomguard", "diagnose", "--format", "json", *arguments]
    ran = subprocess.run(command, capture_output=True, env=env, check=False)
    return {"status": ran.returncode, "out": ran.stdout.decode(), "err": ran.stderr.decode()}


def both(address: str, *arguments: str) -> dict[str, Any]:
    return {
        "here": diagnose(None, *arguments),
        "there": diagnose(address, "--on", "ray", *arguments),
    }


def set_cluster_version(version: str) -> None:
    """Have the cluster say that it runs another version of Ray, as one of another environment does."""
    namespace = b"cluster"
    told = json.loads(internal_kv._internal_kv_get(CLUSTER_METADATA_KEY, namespace=namespace))
    told["ray_version"] = version
    internal_kv._internal_kv_put(
        CLUSTER_METADATA_KEY, json.dumps(told).encode(), overwrite=True, namespace=namespace
    )


def main() -> None:
    os.chdir(sys.argv[1])
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp"
    ) as folder:  # a socket's path is short
        os.environ["RAY_TMPDIR"] = folder
        Path(folder, "ray").mkdir()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        try:
            address = cluster.address
            told = {"all": both(address, "logs", "missing.log", "logs/*.gz")}
            ray.init(address=address, log_to_driver=False)
            set_cluster_version("2.9.3")
            ray.shutdown()
            told["another version"] = diagnose(address, "--on", "ray", "logs/a.log")
        finally:
            cluster.shutdown()
    told["nobody answers"] = diagnose("127.0.0.1:1", "--on", "ray", "logs/a.log")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
