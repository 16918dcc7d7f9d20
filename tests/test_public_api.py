from __future__ import annotations

import subprocess
import sys
import time

import pytest

import oomguard

HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "numpy",
    "rich",
    "structlog",
    "tenacity",
    "wrapt",
    "click",
    "regex",
    "cel_expr_python",
)


def test_the_public_names_are_exactly_these():
    assert sorted(oomguard.__all__) == [
        "Attempt", "Cause", "Diagnosis", "Effect", "Guard", "Incident", "InputError", "LaunchError", "OomguardError",
        "Patch", "Policy", "RuleError", "SettingError", "UsageError", "__version__", "attempts", "diagnose", "guard",
    ]  # fmt: skip


def test_every_public_name_loads():
    assert all(getattr(oomguard, name) is not None for name in oomguard.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        oomguard.nothing_of_the_kind  # noqa: B018


def test_public_functions_stay_callable_after_every_submodule_is_imported():
    code = (
        "import oomguard, pkgutil, importlib\n"
        "for m in pkgutil.walk_packages(oomguard.__path__, 'oomguard.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "assert callable(oomguard.guard) and callable(oomguard.diagnose) and callable(oomguard.attempts)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_oomguard_imports_nothing_heavy():
    code = f"import sys, oomguard; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    )


def test_importing_oomguard_takes_less_than_60_ms_more_than_nothing():
    """The smallest of several runs in turn: what the machine does meanwhile only ever adds."""

    def seconds(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - began

    pairs = [(seconds("pass"), seconds("import oomguard")) for _ in range(10)]
    assert min(ours for _, ours in pairs) - min(nothing for nothing, _ in pairs) < 0.060
