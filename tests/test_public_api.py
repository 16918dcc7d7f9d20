from __future__ import annotations

import builtins
import pydoc
import re
import subprocess
import sys

import pytest

import oomguard

HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "numpy",
    "matplotlib",
    "rich",
    "structlog",
    "tenacity",
    "wrapt",
    "click",
    "regex",
    "ray",
    "fsspec",
)


def test_the_public_names_are_exactly_these():
    assert sorted(oomguard.__all__) == [
        "Attempt",
        "CallBudget",
        "Cause",
        "Comparison",
        "ConfigError",
        "DeadlineError",
        "Diagnosis",
        "Effect",
        "FailedItem",
        "Guard",
        "Incident",
        "InputError",
        "JournalError",
        "LaunchError",
        "MemoryUse",
        "OomguardError",
        "Patch",
        "PlacedDevices",
        "PlacementError",
        "Policy",
        "Results",
        "RuleError",
        "SeenCall",
        "SettingError",
        "StartBudget",
        "StartPlan",
        "StoreError",
        "Timeline",
        "UsageError",
        "WakeUpError",
        "Watch",
        "__version__",
        "amap",
        "attempts",
        "diagnose",
        "diff",
        "enable_metrics",
        "guard",
        "imap",
        "map",
        "place",
        "plan",
        "ray_patched",
        "ray_runtime_env",
        "watch",
    ]


def test_every_public_name_loads():
    assert all(getattr(oomguard, name) is not None for name in oomguard.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        oomguard.nothing_of_the_kind  # noqa: B018


def test_public_functions_survive_importing_every_submodule():
    code = (
        "import oomguard, pkgutil, importlib\n"
        "for m in pkgutil.walk_packages(oomguard.__path__, 'oomguard.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "for name in ('guard', 'attempts', 'diagnose', 'plan', 'diff', 'map', 'imap', 'amap', 'watch'):\n"
        "    assert callable(getattr(oomguard, name)), name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_oomguard_imports_nothing_heavy():
    code = f"import sys, oomguard; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


def test_importing_oomguard_loads_only_itself_and_the_stdlib():
    """What that costs in time, benchmarks/import_time.py measures."""
    code = (
        "import sys; before = set(sys.modules); import oomguard\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(names - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "['oomguard']"


def test_every_exception_that_a_docstring_names_is_public():
    missing = set()
    for name in oomguard.__all__:
        found = getattr(oomguard, name)
        texts = [found.__doc__ or ""]
        if isinstance(found, type):
            texts += [getattr(found, one).__doc__ or "" for one in dir(found) if one[0] != "_"]
        for text in texts:
            raises = re.split(r"\n\s*(?:Returns|Args|Yields):", text.partition("Raises:")[2])[0]
            for error in re.findall(r"\b[A-Z]\w*Error\b", raises):
                if not hasattr(oomguard, error) and not hasattr(builtins, error):
                    missing.add(f"{name} raises {error}")

    assert not missing


def test_help_opens_with_an_example():
    text = pydoc.plain(pydoc.render_doc(oomguard))

    assert text.index("oomguard.diagnose(path=") < text.index("PACKAGE CONTENTS")
    assert oomguard.__doc__.index("import oomguard\n") < 400


def test_a_guard_shows_what_happened_and_nothing_of_how_it_works():
    with oomguard.guard() as g:
        public = [name for name in dir(g) if not name.startswith("_")]

    assert public == ["attempts", "diagnosis", "partial", "snapshot"]
    assert (g.attempts, g.diagnosis, g.partial, g.snapshot) == ((), None, None, None)
