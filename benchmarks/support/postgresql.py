"""A PostgreSQL server of one's own, for tests and benchmarks: that of
examples/throwaway_postgresql.py.
"""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).parents[2] / "examples" / "throwaway_postgresql.py"
_SPEC = importlib.util.spec_from_file_location("throwaway_postgresql", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
throwaway = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(throwaway)
