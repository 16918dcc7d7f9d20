"""Run ``oomguard rules``: list and show rules, check and test rule files, write their pages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oomguard.cli.options import (
    Group,
    GroupedCommand,
    color_option,
    console,
    option,
    read_rules,
    rules_option,
)
from oomguard.core.errors import InputError, OomguardError, RuleError, UsageError
from oomguard.core.files import read_regular

if TYPE_CHECKING:
    from oomguard.rules.rule_files import Rule, RuleSet
    from oomguard.rules.signature import Signature

_INDEX: Final = "README.md"
# Longer lines are hard to read.
_MAX_COLUMNS: Final = 100
# A page has a few kilobytes. A larger file was not written by this command.
_MAX_PAGE_BYTES: Final = 1 << 20


@click.group("rules", cls=Group)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, show, check and test rule files."""
    # click looks for the options of `rules list` under "list", but [tool.oomguard] has one flat
    # table of options.
    ctx.default_map = dict.fromkeys(command.commands, ctx.default_map or {})


@command.command(
    "list", cls=GroupedCommand, common=("signatures",), example="oomguard rules list --signatures"
)
@option(
    "--signatures",
    is_flag=True,
    help="Also list the signatures with their kinds and wordings.",
)
@rules_option
def list_rules(signatures: bool, rules: tuple[str, ...]) -> int:
    """List every rule with its code, cause and title."""
    found = _read(rules)
    for rule in found.rules:
        _print_plain(f"{rule.code}  {rule.cause:<36}{rule.title}")
    for signature in found.signatures if signatures else ():
        count = len(signature.wordings)
        kind = signature.kind or "context"
        _print_plain(f"{signature.name:<44}{kind:<40}{count} wording{'s' if count != 1 else ''}")
    return 0


@command.command("show", cls=GroupedCommand, example="oomguard rules show OG201")
@click.argument("name", metavar="CODE|SIGNATURE")
@rules_option
@color_option
def show(name: str, rules: tuple[str, ...], color: str) -> int:
    """Show one rule or signature in full: conditions, explanation, fixes, costs and tests.

    CODE is a rule's code (OG201) or a cause (all its rules). SIGNATURE is a name such as
    vllm/kv_cache_none_left, or a kind.
    """
    rule_set = _read(rules)
    pages = []
    for rule in rule_set.rules:
        if name.lower() in {rule.code.lower(), rule.cause}:
            pages.append(_rule_page(rule, rule_set))
    if not pages:
        for signature in rule_set.signatures:
            if name in {signature.name, Path(signature.path).stem, signature.kind}:
                pages.append(_signature_page(signature))
    if not pages:
        from oomguard.rules.syntax import suggestion

        known = []
        for rule in rule_set.rules:
            known += [rule.code, rule.cause]
        for signature in rule_set.signatures:
            known += [signature.name, Path(signature.path).stem]
        hint = suggestion(name.upper(), tuple(known)) or suggestion(
            name, tuple(dict.fromkeys(known))
        )
        raise UsageError(
            f"no rule or signature has the name {name!r}",
            hint=hint or "oomguard rules list --signatures lists all names",
        )
    text = "\n".join(pages)
    out = console(color)
    if out.is_terminal and out.encoding.lower().startswith("utf"):
        from rich.markdown import Markdown

        from oomguard.report.explanation import PAGE_MARK

        out.print(Markdown(text.replace(PAGE_MARK, "")), width=min(out.width, _MAX_COLUMNS))
    else:
        _print_plain(text)
    return 0


@command.command(
    "pages", cls=GroupedCommand, common=("check",), example="oomguard rules pages docs/rules"
)
@click.argument("folder", metavar="DIR", type=click.Path())
@option(
    "--check",
    is_flag=True,
    help="Write nothing, and exit with status 1 if a page is not up to date.",
)
@rules_option
def pages(folder: str, check: bool, rules: tuple[str, ...]) -> int:
    """Write one Markdown page for each rule, and an index, into DIR.

    Pages of rules that no longer exist are removed. The same rules always give the same pages. The
    command never replaces or removes a file that it did not write.
    """
    wanted = rule_pages(_read(rules))
    root = Path(folder)
    try:
        there = _written_pages(root)
        differing = []
        for name in sorted(wanted.keys() | there.keys()):
            if wanted.get(name) != there.get(name):
                differing.append(name)
        if check:
            for name in differing:
                click.echo(f"{root / name} is not up to date")
            if differing:
                return 1
            return 0
        # A page that this command did not write is the user's own file.
        kept = []
        for name in differing:
            if name not in there and (root / name).exists():
                kept.append(root / name)
        if kept:
            hint = "name a folder that contains only rule pages"
            raise InputError(
                f"{kept[0]} was not written by this command, so it is not replaced", hint=hint
            )
        root.mkdir(parents=True, exist_ok=True)
        for name in differing:
            if name in wanted:
                (root / name).write_text(wanted[name], encoding="utf-8")
            else:
                (root / name).unlink()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}: {getattr(error, 'strerror', None) or error}", hint="DIR must be a folder"
        ) from None
    click.echo(f"{len(wanted)} pages in {folder}, {len(differing)} changed")
    return 0


def _read(folders: tuple[str, ...]) -> RuleSet:
    """Load the rules and check the values in their tests, which a run does not need.

    Raises:
        RuleError: if a value is wrong; it names the file and the key.
    """
    from oomguard.core.facts import REGISTRY, is_of_type

    found = read_rules(folders, check=True)
    for rule in found.rules:
        for i, test in enumerate(rule.tests):
            for name, value in test["facts"].items():
                # The test's own run reports an unknown name, with all other mistakes of the test.
                if name in REGISTRY and not is_of_type(name, value):
                    kind = REGISTRY[name].type
                    raise RuleError(
                        f"expected {kind}, got {value!r}",
                        path=rule.path,
                        key=f"test[{i}].facts.{name}",
                    )
            _check_expected(test.get("expect", {}), rule.path, f"test[{i}].expect")
    return found


def _check_expected(expect: Mapping[str, Any], path: str, key: str) -> None:
    for name in ("cause", "text"):
        if not isinstance(expect.get(name, ""), str):
            raise RuleError("expected text", path=path, key=f"{key}.{name}")
    for name in ("plan", "alternatives"):
        rows = expect.get(name, [])
        if not isinstance(rows, list) or not all(map(_is_expected_row, rows)):
            raise RuleError(
                "expected a list of { setting = ..., to = ... }", path=path, key=f"{key}.{name}"
            )


def _is_expected_row(row: Any) -> bool:
    if not isinstance(row, dict) or "to" not in row:
        return False
    return isinstance(row.get("setting"), str) and isinstance(row.get("reason", ""), str)


def rule_pages(rules: RuleSet) -> dict[str, str]:
    """Return the text of every page by file name: one for each rule, and the index."""
    from oomguard.report.explanation import index_page

    found = {f"{rule.code}.md": _rule_page(rule, rules) for rule in rules.rules}
    return {**found, _INDEX: index_page(rules.rules, rules.signatures)}


def _written_pages(root: Path) -> dict[str, str]:
    """Return the text of the folder's pages that this command wrote, by file name."""
    from oomguard.report.explanation import PAGE_MARK

    if not root.exists():
        return {}
    found = {}
    for path in sorted(root.iterdir()):
        if path.suffix == ".md" and path.is_file() and path.stat().st_size <= _MAX_PAGE_BYTES:
            text = read_regular(path, _MAX_PAGE_BYTES).decode("utf-8")
            if PAGE_MARK in text:
                found[path.name] = text
    return found


def _rule_page(rule: Rule, rules: RuleSet) -> str:
    from oomguard.diagnosis import assess, incident_from, model_from
    from oomguard.remedy.from_log import SOLVERS
    from oomguard.remedy.policy import Policy
    from oomguard.report.explanation import Example, rule_page

    # Only this rule is loaded, so that its page does not change when another rule is added.
    alone = replace(rules, rules=(rule,))
    examples = []
    for i, test in enumerate(rule.tests):
        try:
            observed = incident_from(test["kind"], test["facts"])
            incident = assess(observed, alone, Policy(), memory_model=model_from(test))
        except OomguardError as error:
            # A fix may name an unknown setting or solver.
            raise RuleError(str(error), path=rule.path, key=f"test[{i}]") from None
        examples.append(Example(test["kind"], {**test["facts"], **test.get("call", {})}, incident))
    solvers = {name: _in_words(solver.__doc__ or name) for name, solver in SOLVERS.items()}
    return rule_page(rule, examples, file=_file(rule.path), solvers=solvers)


def _signature_page(signature: Signature) -> str:
    from oomguard.report.explanation import signature_page
    from oomguard.rules.signature import group_fact

    facts = {}
    for wording in signature.wordings:
        for group in wording.pattern.groupindex:
            fact = group_fact(group)
            if fact:
                facts[group] = fact
    return signature_page(signature, file=_file(signature.path), group_facts=facts)


def _in_words(docstring: str) -> str:
    """Return the first paragraph of a docstring, which is one sentence."""
    return " ".join(docstring.partition("\n\n")[0].split()).rstrip(".").replace("``", "`")


def _file(path: str) -> str:
    """Return a shipped file's path in the repository; any other path as given."""
    from oomguard.rules.rule_files import shipped_root

    found = Path(path)
    root = shipped_root()
    if found.is_relative_to(root):
        return f"rules/{found.relative_to(root).as_posix()}"
    return path


def _print_plain(text: str) -> None:
    """Print lines without terminal escapes, and replace characters that the terminal lacks."""
    from oomguard.core.text import strip_escapes

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for line in text.split("\n"):
        click.echo(strip_escapes(line).rstrip().encode(encoding, "replace").decode(encoding))


@command.command("check", cls=GroupedCommand, example="oomguard rules check --rules ./rules")
@rules_option
def check(rules: tuple[str, ...]) -> int:
    """Load every rule file and print the first mistake with its file, key and column."""
    rule_set = _read(rules)
    click.echo(
        f"{len(rule_set.signatures)} signature files and {len(rule_set.rules)} rules: no mistakes"
    )
    return 0


@command.command("test", cls=GroupedCommand, example="oomguard rules test --rules ./rules")
@rules_option
def test(rules: tuple[str, ...]) -> int:
    """Run the tests in the rule files, and exit with status 1 if one fails."""
    from oomguard.diagnosis import problems

    rule_set = _read(rules)
    found = problems(rule_set)
    for text in found:
        _print_plain(text)
    tests = sum(len(signature.tests) for signature in rule_set.signatures)
    tests += sum(len(rule.tests) for rule in rule_set.rules)
    click.echo(
        f"{tests} tests in {len(rule_set.signatures)} signature files and {len(rule_set.rules)} "
        f"rules: {len(found)} problems"
    )
    if found:
        return 1
    return 0
