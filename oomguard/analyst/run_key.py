"""What an attempt runs, by which a later run knows it again: the command, its files, the engine,
the model, the device.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from oomguard.core.facts import format_gib
from oomguard.core.files import read_regular
from oomguard.core.incident import EngineStart, Incident
from oomguard.core.settings import value_in_force
from oomguard.journal.record import Ran
from oomguard.probe.nvml import devices
from oomguard.remedy.policy import set_by_user
from oomguard.report.redact import hides_secrets_alone, homes_kept, mask, mask_command

# What decides what a command does: programs, and what they are configured by.
_ENDS: Final = (".py", ".sh", ".yaml", ".yml", ".json", ".toml")
_MOST_BYTES: Final = 1 << 20
_MOST_FILES: Final = 16


def started_as(argv: Sequence[str]) -> dict[str, Any]:
    """Return how a run was started, as the journal keeps it.

    That is the command masked, and whether of secrets alone, the folder, the files' digest, the
    user's name and the host's.
    """
    folder = None
    with homes_kept(), suppress(OSError):  # the working directory may be gone
        folder = mask(str(Path.cwd()))
    original = mask_command(argv, keep_homes=True)
    is_exact = hides_secrets_alone(argv, original)
    told = {
        "original": original,
        "folder": folder,
        "files": digest_of_files(argv),
        "hides_secrets_alone": is_exact,
    }
    return told | {"who": user_name(), "host": host_name()}


def host_name() -> str | None:
    """Return this machine's name; None where it has none."""
    return platform.node() or None


def user_name() -> str | None:
    """Return the user's name; None where this machine has none for its number, as in many
    containers.
    """
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def digest_of_files(argv: Sequence[str]) -> str | None:
    """Return a digest of the programs and configuration files that a command names; None where it
    names none.
    """
    digest = hashlib.sha256()
    found = 0
    for name in dict.fromkeys(word.rpartition("=")[2] for word in argv if word.endswith(_ENDS)):
        try:
            content = read_regular(name, _MOST_BYTES)
        except OSError:
            continue
        found += 1
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        if found == _MOST_FILES:
            break
    if found:
        return digest.hexdigest()[:32]
    return None


def names_a_place_here(argv: Sequence[str]) -> bool:
    """Return whether a word of a command is a path of the working directory: elsewhere it is
    another file, or model.
    """
    tails = (word.rpartition("=")[2] for word in argv)
    return any(tail and not tail.startswith("/") and os.path.lexists(tail) for tail in tails)


def device_words() -> str | None:
    """Return name and size of this machine's GPUs, each kind once; None where NVML does not tell.

    Where there are several kinds, or parts of one, those that the environment shows are named with
    it.
    """
    kinds = {
        device.name
        if device.total_bytes is None
        else f"{device.name}, {format_gib(device.total_bytes)}"
        for device in devices() or ()
        if device.name
    }
    if not kinds:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    words = " + ".join(sorted(kinds))
    if visible and (len(kinds) > 1 or "MIG" in visible):
        return f"{words} ({visible})"
    return words


def what_ran(incident: Incident | None, start: EngineStart | None, device: str | None) -> Ran:
    """Return what an attempt turned out to run, masked.

    Args:
        incident: what it failed of.
        start: what its engine told of itself.
        device: the GPUs, as ``device_words`` has them.
    """
    engine = version = model = None
    both: tuple[Incident | EngineStart | None, ...] = (incident, start)
    for told in both:
        if told is None:
            continue
        if told.framework != "unknown":
            engine = told.framework
        version = told.framework_version or version
        named = value_in_force("model", told.settings, told.facts)
        if named is not None:
            model = str(named[0])
    return Ran(engine, version, None if model is None else mask(model), device)


def chosen_by_user(incident: Incident | None) -> dict[str, bool | None]:
    """Return whether the user had set what the plan of a failure changes, by setting."""
    if incident is not None:
        plan = incident.plan
    else:
        plan = ()
    return {
        patch.setting: set_by_user(patch.setting, incident)
        for patch in plan
        if incident and patch.new is not None
    }
