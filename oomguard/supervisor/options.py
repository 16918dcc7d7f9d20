"""Read the part of the command line of ``oomguard run`` that the supervisor needs.

A run with no options, or with plain ones, starts its command at once. The analyst reads every other
command line, variable or configuration file before the command starts, because it knows settings,
rules, devices and ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

DEFAULT_GRACE_S: Final = 30.0
LONGEST_S: Final = 10**9
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_EFFECTS: Final = ("output-preserving", "reduces-capacity", "changes-outputs")
# Options that need nothing before the command starts, with their values. None means a time, and an
# empty tuple a whole number above zero.
_PLAIN: Final[Mapping[str, tuple[str, ...] | None]] = {
    "--allow": _EFFECTS,
    "--color": ("auto", "always", "never"),
    "--exit-status": ("own", "by-cause"),
    "--grace": None,
    "--hang-after": None,
    "--host-reserve": ("auto", "0"),
    "--log-format": ("console", "json"),
    "--max-attempts": (),
    "--max-per-hour": (),
    "--restart": ("no", "on-failure"),
}
_SWITCHES: Final = frozenset({"--dry-run", "--idempotent", "--no-pty", "--pty", "--quiet", "-q"})
# Variables that set an option of a run, or that need the analyst before the command starts.
_OPTION_NAMES: Final = (
    (
        "allow pin min rules max-attempts max-relaunches max-per-hour deadline dry-run "
        "idempotent report metrics step-recovery snapshot journal reuse"
    ),
    (
        "grace pty log-format gpus wait lease lease-folder rank world-size rendezvous rank-timeout "
        "restart hang-after input host-reserve"
    ),
    "termination-message probes exit-status slurm-comment slurm-requeue quiet verbose color",
)
_OPTION_VARIABLES: Final = frozenset(
    "OOMGUARD_" + name.upper().replace("-", "_") for name in " ".join(_OPTION_NAMES).split(" ")
)
_EARLY_VARIABLES: Final = frozenset(
    {"NOTIFY_SOCKET", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"}
)
# Words of a command that may be one rank of several.
_RANK_WORDS: Final = ("--nnodes", "-n", "--node-rank", "-r", "--data-parallel-s", "-dp")
_MOST_BYTES: Final = 256 * 1024
_TABLE_BYTES: Final = (
    b"tool.oomguard",
    b"[tool]",
    b'tool."',
    b"tool.'",
    b'tool"',
    b"tool'",
    b"tool=",
)


class Options:
    """Hold the supervisor's options.

    ``analyst_first`` says whether the analyst must read the options before the command starts.
    ``host_reserve_bytes`` is None for the default reserve, and 0 for none.
    """

    def __init__(self) -> None:
        self.analyst_first = False
        self.grace_s = DEFAULT_GRACE_S
        self.pty = True
        self.quiet = False
        self.is_json = False
        self.status_by_cause = False
        self.input_path: str | None = None
        self.host_reserve_bytes: int | None = None


def read_options(
    words: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
) -> Options:
    """Read the words before ``--``; all other options are left to the analyst."""
    found = Options()
    if os.path.exists(f"/proc/{environ.get('OOMGUARD_OUTER_RUN', 'none')}"):
        # The outer run watches the host's memory already.
        found.host_reserve_bytes = 0
    is_plain = _read_words(found, list(words))
    found.analyst_first = (
        not is_plain or _is_asked_early(command, environ) or _has_own_file(environ) or _has_table()
    )
    return found


def _read_words(found: Options, words: list[str]) -> bool:
    """Store plain options; return False at the first other one."""
    while words:
        name, is_joined, value = words.pop(0).partition("=")
        if name in _SWITCHES and not is_joined:
            found.pty = {"--pty": True, "--no-pty": False}.get(name, found.pty)
            found.quiet = found.quiet or name in {"-q", "--quiet"}
            continue
        if name not in _PLAIN or not (is_joined or words):
            return False
        if not is_joined:
            value = words.pop(0)
        if not _note(found, name, value):
            return False
    return True


def _note(found: Options, name: str, value: str) -> bool:
    choices = _PLAIN[name]
    if choices is None:
        seconds = seconds_of(value)
        if seconds is None:
            return False
        if name == "--grace":
            found.grace_s = seconds
        return True
    if not choices:
        is_number = value.isascii() and value.isdecimal() and len(value) < 9
        return is_number and not value.startswith("0")
    if name == "--log-format":
        found.is_json = value == "json"
    if name == "--host-reserve" and value == "0":
        found.host_reserve_bytes = 0
    if name == "--exit-status":
        found.status_by_cause = value == "by-cause"
    return value in choices


def seconds_of(text: str) -> float | None:
    """Convert a time such as 90 or 30m to seconds; None for any other format."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS_S else (text, "s")
    if not (number.isascii() and number.isdecimal() and len(number) < 9):
        return None
    seconds = float(number) * _UNITS_S[unit]
    if seconds <= LONGEST_S:
        return seconds
    return None


def _is_asked_early(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    names = set(environ)
    return (
        bool(names & _OPTION_VARIABLES)
        or bool(names & _EARLY_VARIABLES)
        or any(name.startswith("OTEL_") for name in names)
        or any(word.startswith(_RANK_WORDS) for word in command[1:])
    )


def _has_own_file(environ: Mapping[str, str]) -> bool:
    """Return whether the user has a configuration file, or its place is unclear."""
    named = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        return True
    if named.startswith("/"):
        folder = named
    else:
        folder = f"{home}/.config"
    return os.path.lexists(f"{folder}/oomguard/config.toml")


def _has_table() -> bool:
    """Return whether a pyproject.toml here or above may have a table for oomguard."""
    try:
        folder = os.getcwd()
    except OSError:
        return False
    while True:
        if _may_hold_table(f"{folder}/pyproject.toml"):
            return True
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above


def _may_hold_table(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        content = os.read(fd, _MOST_BYTES + 1)
    except OSError:
        return False
    finally:
        os.close(fd)
    if b"oomguard" not in content:
        return False
    # Only bytes are searched, because loading a TOML parser takes longer than the rest of the
    # start.
    packed = content.replace(b" ", b"").replace(b"\t", b"")
    return len(content) > _MOST_BYTES or any(mark in packed for mark in _TABLE_BYTES)
