"""The recipes and the checks are shared with the coverage-guided fuzzer, in fuzz/ at the top."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "fuzz"))
