"""Write the parts of the documentation site that are made from the code.

    python scripts/docs_site.py reference   docs/reference/ and docs/rules/, before the site is built
    python scripts/docs_site.py markdown    llms.txt and the Markdown of each page, in site/

`make docs` runs both. None of these folders is kept in git.
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MADE_FOLDERS = ("reference", "rules")
SITE = ROOT / "site"
TEMPLATES = ROOT / "scripts" / "reference"
MADE = "<!-- made by scripts/docs_site.py: change the code, not this page -->"
EXAMPLE_LOG = "examples/logs/vllm_serve_kv_cache.log"


def cell(text: str) -> str:
    """Return a text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def code_cell(text: str) -> str:
    """Return a text in code font as one cell of a Markdown table; it may contain a bar."""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def code(text: str) -> str:
    """Return a docstring's text with Markdown's single backquotes."""
    return text.replace("``", "`")


# The command line


def commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield each command with its full name and its context, in the order of the help page."""
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    if not isinstance(command, click.Group):
        yield name, command, context
        return
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        assert found is not None
        yield from commands(found, f"{name} {child}", context)


def every_command() -> list[tuple[str, click.Command, click.Context]]:
    """Return all commands of oomguard."""
    from oomguard.cli import _group

    return list(commands(_group, "oomguard"))


def help_text(command: click.Command) -> str:
    """Return the text of a command's help page, one line a paragraph."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    return "\n\n".join(" ".join(text.replace("\b", "").split()) for text in paragraphs)


def cli_page() -> str:
    """Return the page of the command line: each command with its options."""
    lines = ["# Command line", "", MADE, ""]
    lines += ["Every option is also a [variable, or a line of a file](environment.md).", ""]
    for name, command, context in every_command():
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## `{name}`", "", f"```text\n{name} {usage}\n```", "", help_text(command), ""]
        if example := getattr(command, "example", ""):
            lines += [f"Example: `{example}`", ""]
        common = getattr(command, "common", ())
        groups: dict[str, list[str]] = {"Common": []}
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None and record[1]:
                row = f"| {code_cell(record[0])} | {cell(record[1])} |"
                group = getattr(parameter, "group", "Output and help")
                if parameter.name in common:
                    group = "Common"
                groups.setdefault(group, []).append(row)
        for group, rows in groups.items():
            if rows:
                lines += [f"**{group}**", "", "| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


# Exit statuses and variables


def exit_codes_page() -> str:
    """Return the page of the exit statuses: what each command says of them, and a table."""
    says = ["| command | exit status |", "|---|---|"]
    for name, command, _ in every_command():
        parts = help_text(command).split("\n\n")
        said = [part for part in parts if "xit status" in part or "xits with" in part]
        if said:
            text = " ".join(said).removeprefix("Exit status: ")
            says.append(f"| `{name}` | {cell(text[:1].upper() + text[1:])} |")
    table = ROOT / "oomguard" / "cluster" / "statuses.toml"
    statuses = tomllib.loads(table.read_text(encoding="utf-8"))["statuses"]
    return filled("exit-codes.md", {"commands": "\n".join(says), **statuses})


def environment_page() -> str:
    """Return the page of the environment variables: those of options from the code."""
    rows = ["| variable | option |", "|---|---|"]
    for name, command, context in every_command():
        if name != "oomguard run":
            continue
        for parameter in command.get_params(context):
            if parameter.opts[0].startswith("--") and parameter.name not in ("help", "version"):
                option = max(parameter.opts, key=len)
                variable = "OOMGUARD_" + str(parameter.name).upper()
                rows.append(f"| `{variable}` | `{option}` |")
    return filled("environment.md", {"options": "\n".join(rows)})


# Python


def docstring(text: str) -> list[str]:
    """Return a docstring as Markdown: sections as lists, indented parts as code."""
    lines = []
    section = ""
    example: list[str] = []
    fenced = False
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        if line.startswith("```"):
            fenced = not fenced
        title = re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes):", line)
        indented = line.startswith("    ")
        starts_code = indented and (not section or line.lstrip().startswith((">>>", "@")))
        if not fenced and (starts_code or (example and (indented or not line))):
            example.append(line[4:])
            continue
        if example:
            lines += ["", "```python", *"\n".join(example).strip().splitlines(), "```", ""]
            example = []
        if title:
            section = title[1]
            lines += ["", f"**{section}**", ""]
        elif section and re.match(r" {4}[\w.*]+(?: \(.*\))?: ", line):
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {code(meaning)}")
        elif section and indented:
            lines.append(("  " if line.startswith(" " * 8) else "") + code(line.strip()))
        else:
            if line.strip():
                section = ""
            is_code = fenced or line.startswith("```")
            lines.append(line if is_code else code(line))
    if example:
        lines += ["", "```python", *"\n".join(example).strip().splitlines(), "```", ""]
    return lines


def signature(name: str, value: Any) -> str:
    """Return a function's or a class's signature, an argument a line if it is long."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return f"oomguard.{name}"
    line = f"oomguard.{name}{found}"
    line = re.sub(r"'([\w. |\[\],]+)'", r"\1", line)
    if len(line) <= 90:
        return line
    parts = []
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(re.sub(r"'([\w. |\[\],]+)'", r"\1", str(one)))
    return f"oomguard.{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def python_page() -> str:
    """Return the page of the Python names, functions first."""
    import oomguard

    names = [name for name in oomguard.__all__ if not name.startswith("__")]
    values = {name: getattr(oomguard, name) for name in names}

    def order(name: str) -> tuple[int, str]:
        value = values[name]
        if not inspect.isclass(value):
            return 0, name
        return 1 + issubclass(value, Exception), name

    lines = ["# Python", "", MADE, "", "Everything here is imported from `oomguard`.", ""]
    for name in sorted(names, key=order):
        lines += [f"## `{name}`", "", f"```python\n{signature(name, values[name])}\n```", ""]
        lines += [*docstring(values[name].__doc__ or ""), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


# JSON, settings, metrics


def words(names: Any) -> str:
    """Return names in code font, in one line."""
    return " · ".join(f"`{name}`" for name in names)


def json_page() -> str:
    """Return the page of the JSON contract: keys in words, closed lists from the code."""
    from oomguard.core.facts import REGISTRY
    from oomguard.core.incident import CAUSES, KINDS, NOT_OOM_KINDS, PHASES

    command = [sys.executable, "-m", "oomguard", "diagnose", "--format", "json", EXAMPLE_LOG]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    facts = ["| fact | type | meaning |", "|---|---|---|"]
    for spec in REGISTRY.values():
        facts.append(f"| `{spec.name}` | {spec.type} | {cell(spec.meaning)} |")
    values = {
        "example": json.dumps(json.loads(ran.stdout), indent=2, ensure_ascii=False),
        "kinds": words(KINDS),
        "not_oom": words(kind for kind in KINDS if kind in NOT_OOM_KINDS),
        "causes": words(CAUSES),
        "phases": words(PHASES),
        "facts": "\n".join(facts),
    }
    return filled("json.md", values)


def settings_page() -> str:
    """Return the page of the settings: effect, and flag by engine."""
    from oomguard.core.settings import engines as known_engines
    from oomguard.core.settings import surface

    table = tomllib.loads((ROOT / "oomguard" / "core" / "settings.toml").read_text("utf-8"))
    engines = sorted(known_engines())
    rows = ["| setting | effect of a change | " + " | ".join(engines) + " |"]
    rows.append("|---|---|" + "---|" * len(engines))
    for name, spec in sorted(table.items()):
        raised = spec.get("raised", spec.get("effect", ""))
        lowered = spec.get("lowered", spec.get("effect", ""))
        effect = raised
        if raised != lowered:
            effect = f"up: {raised or '-'}, down: {lowered or '-'}"
        flags = []
        for engine in engines:
            found = surface(name, engine)
            flags.append(f"`{found.flags[0]}`" if found.flags else "")
        rows.append(f"| `{name}` | {effect} | " + " | ".join(flags) + " |")
    return filled("settings.md", {"settings": "\n".join(rows)})


def metrics_page() -> str:
    """Return the page of the metrics and spans."""
    folder = ROOT / "oomguard" / "telemetry"
    metrics = tomllib.loads((folder / "metrics.toml").read_text(encoding="utf-8"))["metric"]
    spans = tomllib.loads((folder / "spans.toml").read_text(encoding="utf-8"))
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for one in metrics:
        labels = ", ".join(f"`{label}`" for label in one["labels"])
        lines.append(f"| `{one['name']}` | {one['type']} | {labels} | {cell(one['help'])} |")
    span = ["| span | meaning |", "|---|---|"]
    for one in (*spans["span"], *spans["event"]):
        span.append(f"| `{one['name']}` | {cell(one['what'])} |")
    attribute = ["| attribute | on | meaning |", "|---|---|---|"]
    for one in spans["attribute"]:
        name = one["name"] + ("…" if one["name"].endswith(".") else "")
        where = ", ".join(f"`{place}`" for place in one["on"])
        attribute.append(f"| `{name}` | {where} | {cell(one['what'])} |")
    values = {"metrics": lines, "spans": span, "attributes": attribute}
    return filled("metrics.md", {key: "\n".join(rows) for key, rows in values.items()})


def filled(name: str, values: Mapping[str, object]) -> str:
    """Return a template with its ``{{names}}`` filled in, and the line that says who made it."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", str(value))
    left = re.findall(r"\{\{\w+\}\}", text)
    if left:
        raise ValueError(f"{name}: nothing fills {left}")
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{MADE}\n{rest}"


def reference_pages() -> dict[str, str]:
    """Return the text of every page made from the code by its path below docs/."""
    from oomguard.cli.rules import rule_pages
    from oomguard.rules.rule_files import load_rules

    pages = {
        "reference/cli.md": cli_page(),
        "reference/python.md": python_page(),
        "reference/json.md": json_page(),
        "reference/exit-codes.md": exit_codes_page(),
        "reference/environment.md": environment_page(),
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
    }
    rules = {f"rules/{name}": text for name, text in rule_pages(load_rules()).items()}
    return {**pages, **rules}


def write_reference() -> None:
    """Write docs/reference and docs/rules anew."""
    pages = reference_pages()
    for folder in MADE_FOLDERS:
        shutil.rmtree(DOCS / folder, ignore_errors=True)
    for name, text in pages.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(pages)} pages in docs/reference and docs/rules")


# The Markdown beside the site's pages


def navigation(entry: Any, section: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (section, title, page) of the site's navigation."""
    for part in entry:
        ((title, value),) = part.items()
        if isinstance(value, str):
            yield section, title, value
        else:
            yield from navigation(value, title)


def summary(page: str) -> str:
    """Return the first whole sentence of a page that is neither a heading nor code."""
    text = re.sub(r"^(```+).*?^\1$|<!--.*?-->", "", page, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if line and line[0] not in "#|-<":
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
            sentence = re.split(r"(?<=[.?])\s", plain)[0]
            if sentence.endswith((".", "?")) and len(sentence) > 20:
                return sentence
    return ""


def llms_text() -> str:
    """Return llms.txt: what oomguard is, and each page of the navigation with one sentence."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}", ""]
    made = reference_pages()
    last = None
    for section, title, page in navigation(project["nav"]):
        if section != last:
            lines += ["", f"## {section or 'Start'}", ""]
            last = section
        text = made.get(page) or (DOCS / page).read_text(encoding="utf-8")
        lines.append(f"- [{title}]({page}): {summary(text)}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def write_markdown() -> None:
    """Copy each page's Markdown next to its HTML, and write llms.txt at the site's root."""
    for path in DOCS.rglob("*.md"):
        target = SITE / path.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (SITE / "llms.txt").write_text(llms_text(), encoding="utf-8")
    print("site/llms.txt and the Markdown of each page")


def main() -> int:
    """Write what the command names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["reference", "markdown"])
    {"reference": write_reference, "markdown": write_markdown}[parser.parse_args().what]()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
