"""Figure: what a default install brings: distributions beside oomguard itself, MiB on disk, none of
the heavy ones.

The wheel of this checkout is installed into a new environment; pip and setuptools were there before
and do not count.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from support.commands import ROOT
from support.figure import conclude

GOAL_DISTRIBUTIONS = 14
GOAL_MIB = 50
HEAVY = {
    "torch",
    "numpy",
    "sqlalchemy",
    "alembic",
    "hyperscan",
    "zstandard",
    "cel-expr-python",
    "transformers",
    "vllm",
}
_LIST = """
import importlib.metadata as metadata
for found in metadata.distributions():
    print(found.metadata["Name"].lower(), sum(f.locate().stat().st_size for f in found.files or () if f.locate().is_file()))
"""


def installed(python: Path) -> dict[str, int]:
    """Return the distributions of an environment with their bytes."""
    printed = subprocess.run(
        [python, "-c", _LIST], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split() for line in printed.splitlines())
    return {name: int(size) for name, size in rows}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        python = environment / "bin" / "python"
        before = installed(python)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, str(ROOT)], check=True, stderr=subprocess.DEVNULL)
        after = installed(python)
        subprocess.run([python, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    own = after.pop("oomguard")
    brought = {name: size for name, size in after.items() if name not in before}
    size_mib = (own + sum(brought.values())) / 2**20
    for name, size in sorted({**brought, "oomguard": own}.items(), key=lambda row: -row[1]):
        print(f"  {size / 2**20:5.1f} MiB  {name}")
    heavy = sorted(HEAVY.intersection(brought))
    conclude(
        f"a default install brings {len(brought)} distributions (goal <= {GOAL_DISTRIBUTIONS}), "
        f"{size_mib:.0f} MiB with oomguard "
        f"(goal <= {GOAL_MIB}); heavy ones among them: {', '.join(heavy) or 'none'}",
        met=len(brought) <= GOAL_DISTRIBUTIONS and size_mib <= GOAL_MIB and not heavy,
    )


if __name__ == "__main__":
    main()
