"""vLLM's flags that a plan does not count: whoever pastes a ``vllm serve`` line is told of them, not refused."""

from __future__ import annotations

from typing import Final

import click

from oomguard.surfaces import left_alone

OTHER_FLAGS: Final = "oomguard.other_flags"


class PlanCommand(click.Command):
    """A command that sets vLLM's other flags aside, in ``ctx.meta``, before its own options are read."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments without those flags and their values."""
        own, others = split_off(
            args, {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        )
        ctx.meta[OTHER_FLAGS] = others
        return super().parse_args(ctx, own)


def split_off(words: list[str], known: set[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the words that are ours and vLLM's other flags, each with its value as one word.

    A word behind such a flag is its value, but for the only one that can be the model.

    Args:
        words: the arguments.
        known: the flags that are ours.
    """
    own: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*own, word, *left], others
        if not _is_other(word, known):
            own.append(word)
            if word in known and "=" not in word and left and not left[0].startswith("-"):
                own.append(left.pop(0))
            continue
        if (
            "=" not in word
            and left
            and not left[0].startswith("-")
            and (_has_model(own, known) or _has_model(left[1:], known))
        ):
            word = f"{word} {left.pop(0)}"
        others.append(word)
    return own, others


def _is_other(word: str, known: set[str]) -> bool:
    flag = word.partition("=")[0]
    if flag in known or not flag.startswith("--"):
        return False
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_").split(".")[0]
    return name in left_alone()


def _has_model(words: list[str], known: set[str]) -> bool:
    """Whether one of the words stands by itself: no flag, and behind none."""
    before = ""
    for word in words:
        if not word.startswith("-") and not (before.startswith("-") and "=" not in before):
            return True
        before = word
    return False
