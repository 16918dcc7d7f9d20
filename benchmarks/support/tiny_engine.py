"""A tiny model for the real vLLM, and the variables under which the benchmarks of the guard start
it in a process of its own.
"""

import os
import subprocess
from pathlib import Path

from support.commands import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def make_tiny(folder: Path) -> None:
    """Write the model into ``folder / "tiny"``."""
    maker = [PYTHON, ROOT / "examples" / "make_tiny_model.py", "tiny"]
    subprocess.run(maker, cwd=folder, check=True, capture_output=True)


def engine_environment(*paths: Path, **more: str) -> dict[str, str]:
    """Return the variables of a child that imports oomguard from here, and what lies in ``paths``
    before it.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OOMGUARD_", "VLLM_"))
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }
