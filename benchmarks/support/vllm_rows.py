"""What oomguard relies on in one vLLM: flags, arguments, defaults and hooks, each as stated in the
data and as the sources have it.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from oomguard.core.settings import SETTINGS, Surface, default_value, surfaces, table_of
from oomguard.engines.vllm.package import Sources, added_arguments, parsed, read_sources
from oomguard.engines.vllm.plugin import _PARTS, HOOK
from oomguard.estimate.start.start import VllmSettings
from support.vllm_defaults import UNREAD, batch_defaults, default_of, device_sizes

ENGINE = "vllm"
THERE = "there"
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing: what the data say of it for a version, and what the version's sources have."""

    kind: str
    name: str
    stated: str
    found: str
    place: str = ""

    @property
    def holds(self) -> bool:
        """Whether the sources have what is stated."""
        return self.stated == self.found


def presence(kind: str, name: str, *, stated: bool, found: bool, place: str = "") -> Row:
    """Return the row of a thing that is there or absent."""
    return Row(
        kind, name, THERE if stated else ABSENT, THERE if found else ABSENT, place if found else ""
    )


def is_in(versions: str | None, version: str) -> bool:
    """Return whether a version is one of those stated; all are where nothing is stated."""
    return not versions or SpecifierSet(versions).contains(version, prereleases=True)


def argument_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield the flags, arguments, defaults and hooks of the engine's arguments; ``only_in`` has the
    versions of some flags.
    """
    sources = read_sources(package)
    for name, newest in surfaces(ENGINE).items():
        now = newest.in_version(version)
        for own in (newest, *newest.others):
            yield from _flag_rows(
                name, own, sources, is_now=own is now, only_in=only_in, version=version
            )
    yield from _default_rows(sources, package, version)
    yield from _hook_rows(sources, package)


def _flag_rows(
    name: str,
    own: Surface,
    sources: Sources,
    *,
    is_now: bool,
    only_in: Mapping[str, str],
    version: str,
) -> Iterator[Row]:
    flags = [*own.flags, *own.aliases, *(flag for flag, _key in own.inside)]
    for flag in flags:
        if flag in only_in:
            stated = is_in(only_in[flag], version)
        else:
            stated = is_now
        yield presence("flag", flag, stated=stated, found=flag in sources.flags)
    if own.off_flag is not None and SETTINGS[name].type == "bool":
        stated = is_now and is_in(only_in.get(own.off_flag), version)
        yield presence(
            "flag", own.off_flag, stated=stated, found=sources.flags.get(own.flags[0], False)
        )
    if own.kwarg is not None and own.flags:  # one without a flag is a request's own
        yield presence("argument", own.kwarg, stated=is_now, found=own.kwarg in sources.arguments)


def _default_rows(sources: Sources, package: Path, version: str) -> Iterator[Row]:
    batch = batch_defaults(package)
    for (name, size), value in sorted(batch.items()):
        stated = default_value(name, ENGINE, version, device_size=size)
        yield Row("default", f"{name}, {size} device", str(stated), str(value))
    sizes, spares_a100 = device_sizes(package)
    known = table_of(ENGINE, "device_size")
    for name, size_bytes in sizes.items():
        yield Row(
            "default", f"bytes of a {name} device", str(known[f"{name}_bytes"]), str(size_bytes)
        )
    yield presence(
        "default",
        "an A100 counts as small",
        stated=is_in(known["small_versions"], version),
        found=spares_a100,
    )
    assumed = {field.name: field.default for field in dataclasses.fields(VllmSettings)}
    for name, newest in surfaces(ENGINE).items():
        own = newest.in_version(version)
        known_default = default_value(name, ENGINE, version)
        if known_default is not None:
            stated = known_default
        else:
            stated = assumed.get(name)
        if own.kwarg not in sources.arguments or stated in {None, dataclasses.MISSING}:
            continue
        value = default_of(sources.arguments[own.kwarg], package)
        if value is None and isinstance(stated, bool):
            value = False  # an old switch that nobody sets
        yield Row("default", name, _said(stated), _said(value))


def _said(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number:
        return f"{value:g}"
    return str(value)


def _hook_rows(sources: Sources, package: Path) -> Iterator[Row]:
    name = ".".join(HOOK[1:])
    if sources.parameters is not None:
        taken = f"({', '.join(sources.parameters)})"
    else:
        taken = ""
    yield Row("hook", name, THERE, sources.hook_problem or THERE, f"{HOOK[0]} {taken}".strip())
    fields = {
        line.target.id  # type: ignore[attr-defined]
        for node in _classes(package)
        if node.name == "VllmConfig"
        for line in node.body
        if hasattr(line, "target")
    }
    for part in _PARTS:
        yield presence("hook", f"VllmConfig.{part}", stated=True, found=part in fields)


@functools.cache
def _classes(package: Path) -> list[Any]:
    files = [
        path
        for path in (package / "config.py", *sorted((package / "config").glob("*.py")))
        if path.is_file()
    ]
    return [
        node
        for path in files
        for node in parsed(path).body
        if hasattr(node, "name") and hasattr(node, "bases")
    ]


def caller_rows(package: Path, version: str, callers: Mapping[str, str]) -> Iterator[Row]:
    """Yield the modules that turn arguments into a configuration by the hooked function, so that
    the plugin is reached.
    """
    call = re.compile(rf"\.{HOOK[2]}\(")
    for module, versions in callers.items():
        path = package.parent / module
        found = path.is_file() and call.search(path.read_text(encoding="utf-8")) is not None
        yield presence("hook", f"called in {module}", stated=is_in(versions, version), found=found)


def server_rows(package: Path, version: str, only_in: Mapping[str, str]) -> Iterator[Row]:
    """Yield the flags by which a server says where it listens, and the port that it takes by
    itself.
    """
    table = table_of(ENGINE, "server")
    files = [
        path
        for path in package.glob("entrypoints/**/cli_args.py")
        if {"openai", "launchers"} & set(path.parts)
    ]
    files += [path for path in (package / "entrypoints" / "cli" / "serve.py",) if path.is_file()]
    flags = set()
    port = UNREAD
    for tree in map(parsed, files):
        flags |= {flag for found, _call in added_arguments(tree) for flag in found}
        for node in (
            line
            for owner in tree.body
            if hasattr(owner, "bases")
            for line in owner.body
            if hasattr(line, "target")
        ):
            flags.add("--" + node.target.id.replace("_", "-"))
            if node.target.id == "port":
                port = str(default_of(node.value, package))
        for found, call in added_arguments(tree):
            given = {word.arg: word.value for word in call.keywords}
            if "--port" in found and "default" in given:
                port = str(default_of(given["default"], package))
    named = [
        table["host_flag"],
        table["port_flag"],
        table["path_flag"],
        *table["silent_flags"],
        *table["config_flags"],
    ]
    for flag in named:
        yield presence("flag", flag, stated=is_in(only_in.get(flag), version), found=flag in flags)
    yield Row("default", "port of a server", str(table["port"]), port)
