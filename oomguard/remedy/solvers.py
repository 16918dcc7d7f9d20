"""All solvers that a fix of a rule may name, whatever their numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oomguard.remedy.printed import PRINTED, Solver
from oomguard.remedy.static_share import STATIC_SHARE

SOLVERS: Final[Mapping[str, Solver]] = {**PRINTED, **STATIC_SHARE}
