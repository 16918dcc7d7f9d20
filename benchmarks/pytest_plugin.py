"""Figure: what the pytest plugin adds to ``pytest --collect-only`` where no test uses it; both run in turn, medians compared.

The plugin is loaded by its entry point, as where oomguard is installed; ``-p no:oomguard`` is the same without it.
"""

import os
import statistics
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from support.commands import seconds
from support.figure import conclude

ROUNDS, GOAL_MS = 30, 20
ROOT = Path(__file__).parents[1]


def installed(folder: Path) -> None:
    """Let pytest find the entry point in ``folder``, unless oomguard is installed with it."""
    if not any(point.name == "oomguard" for point in entry_points(group="pytest11")):
        info = folder / "oomguard_plugin-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oomguard-plugin\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[pytest11]\noomguard = oomguard.testing.pytest_plugin\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        installed(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(ROOT), os.environ.get("PYTHONPATH", "")])
        test = folder / "test_nothing.py"
        test.write_text("def test_nothing():\n    pass\n")
        plugged = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            os.devnull,
            "--rootdir",
            name,
            "--collect-only",
            "-q",
            str(test),
        ]
        bare = [*plugged, "-p", "no:oomguard"]
        for command in (bare, plugged):
            seconds(command)  # warm
        pairs = [(1000 * seconds(bare), 1000 * seconds(plugged)) for _ in range(ROUNDS)]
    base, own = (statistics.median(side) for side in zip(*pairs, strict=True))
    conclude(
        f"pytest --collect-only {base:.1f} ms, with the plugin {own:.1f} ms: {own - base:.1f} ms more (goal <= {GOAL_MS})",
        met=own - base <= GOAL_MS,
    )


if __name__ == "__main__":
    main()
