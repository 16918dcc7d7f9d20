"""``oomguard rules``: look at the rules in force, check a file, run the rules' own tests."""

from __future__ import annotations

import click

from oomguard.cli.options import option, read_rules


@click.group("rules")
def command() -> None:
    """List, check and test rule files."""


_RULES = option(
    "--rules", multiple=True, type=click.Path(), metavar="DIR", help="A folder of your own rule files. Repeatable."
)


@command.command("list")
@_RULES
def list_rules(rules: tuple[str, ...]) -> int:
    """List every rule: code, cause, title."""
    for rule in read_rules(rules).rules:
        click.echo(f"{rule.code}  {rule.cause:<36}{rule.title}")
    return 0


@command.command("check")
@_RULES
def check(rules: tuple[str, ...]) -> int:
    """Load every rule file and say the first mistake with its file, key and column."""
    rule_set = read_rules(rules)
    click.echo(f"{len(rule_set.signatures)} signature files and {len(rule_set.rules)} rules: no mistakes")
    return 0


@command.command("test")
@_RULES
def test(rules: tuple[str, ...]) -> int:
    """Run the tests inside the rule files; exit status 1 when one fails."""
    from oomguard.selftest import problems

    rule_set = read_rules(rules)
    found = problems(rule_set)
    for text in found:
        click.echo(text)
    tests = sum(len(s.tests) for s in rule_set.signatures) + sum(len(r.tests) for r in rule_set.rules)
    click.echo(
        f"{tests} tests in {len(rule_set.signatures)} signature files and {len(rule_set.rules)} rules: {len(found)} problems"
    )
    return 1 if found else 0
