"""Every check of the machine that this runs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from oomguard.checking.devices import device_checks, left_over_checks
from oomguard.checking.own_files import journal_check, rules_check
from oomguard.checking.software import ENGINES, installed_version, scanner_check, torch_build_check, version_checks
from oomguard.checking.variables import variable_checks
from oomguard.engines.vllm.checks import plugin_checks
from oomguard.journal.location import Location
from oomguard.observe.check import Check
from oomguard.observe.host import ROOT, wsl_version
from oomguard.observe.limits import host_checks
from oomguard.observe.processes import memory_holders
from oomguard.observe.variables import allocator_checks, visible_devices_checks


def check_machine(
    *, rules: tuple[str, ...] = (), journal: Location | None = None, known_variables: frozenset[str] = frozenset()
) -> Iterator[Check]:
    """Yield every check of this machine; one that fails is unknown, and the others are still made.

    Args:
        rules: folders of the user's own rule files.
        journal: where the journal is; None for the user's state folder.
        known_variables: the ``OOMGUARD_`` variables that an option of a command reads.
    """
    from oomguard.observe.nvml import devices

    environ, found, wsl = dict(os.environ), devices(), wsl_version()
    versions = {name: installed_version(name) for name in ENGINES}
    torch, holders = versions["torch"], memory_holders(found)
    looks: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        ("versions", lambda: version_checks(versions)),
        ("device", lambda: device_checks(found, holders, ROOT)),
        ("torch_build", lambda: [torch_build_check(torch, found)]),
        ("left_over", lambda: left_over_checks(found, holders)),
        ("vllm_plugin", lambda: plugin_checks(environ)),
        ("allocator", lambda: allocator_checks(environ, torch, wsl=bool(wsl))),
        ("visible_devices", lambda: visible_devices_checks(environ, None if found is None else len(found))),
        ("variables", lambda: variable_checks(environ, known_variables)),
        ("host", lambda: host_checks(environ)),
        ("journal", lambda: [journal_check(journal)]),
        ("rules", lambda: [rules_check(rules)]),
        ("scanner", lambda: [scanner_check()]),
    )
    for name, look in looks:
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - a machine that nobody has seen yet must not end the look at it
            yield Check(name, "unknown", f"{name}: cannot be looked at: {type(error).__name__}: {error}")
