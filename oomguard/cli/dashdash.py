"""A command line of two parts: our own options, ``--``, and the user's command, which is not read
as ours.
"""

from __future__ import annotations

import shlex
from typing import Final

import click

from oomguard.core.errors import UsageError

_OWN_WORDS: Final = f"{__name__}.own_words"


class CommandAfterDashes(click.Command):
    """A command whose own options end at ``--``: what follows belongs to the user's command,
    whatever it looks like.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read our own options, and keep how they were written."""
        if "--" in args:
            own = args[: args.index("--")]
        else:
            own = args
        if "--" not in args and not {"-h", "--help"} & set(args):
            first = next(
                (
                    i
                    for i, word in enumerate(own)
                    if not word.startswith("-") and not _is_value(self, ctx, own, i)
                ),
                None,
            )
            if first is not None:
                fixed = shlex.join(["oomguard", "run", *own[:first], "--", *own[first:]])
                raise UsageError("-- is missing before the command", hint=fixed)
            raise UsageError("no command to run", hint="oomguard run -- python script.py")
        ctx.meta[_OWN_WORDS] = tuple(own)
        return super().parse_args(ctx, args)


def _is_value(command: click.Command, ctx: click.Context, args: list[str], index: int) -> bool:
    """Whether the word at ``index`` is the value of the option before it."""
    if index:
        before = args[index - 1]
    else:
        before = ""
    return any(
        before in p.opts and isinstance(p, click.Option) and not p.is_flag
        for p in command.get_params(ctx)
    )


def words_before_dashes() -> tuple[str, ...]:
    """Return the words before ``--`` of the command that is under way, as they were written."""
    return tuple(click.get_current_context().meta.get(_OWN_WORDS, ()))
