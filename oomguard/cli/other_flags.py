"""A whole ``vllm serve`` command given to ``plan``: its settings become options, and flags that are not counted are told of."""

from __future__ import annotations

from typing import Final

import click

OTHER_FLAGS: Final = "oomguard.other_flags"
KEPT_WORDS: Final = "oomguard.kept_words"


class PlanCommand(click.Command):
    """A command that takes vLLM's flags as vLLM does; those that are no option go to ``ctx.meta``, and which of them are not counted."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments with vLLM's settings as options, without its other flags.

        Raises:
            NoSuchOption: a flag is neither ours nor one of any version of vLLM.
            InputError: the file of ``--config`` cannot be read.
        """
        from oomguard.engines.vllm.pasted import read_pasted

        options = {
            flag: not getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            for flag in (*option.opts, *option.secondary_opts)
            if flag.startswith("-")
        }
        found = read_pasted(args, options)
        if found.unknown is not None:
            raise click.NoSuchOption(found.unknown, possibilities=found.nearest, ctx=ctx)
        ctx.meta[OTHER_FLAGS] = found.not_counted
        ctx.meta[KEPT_WORDS] = found.kept
        return super().parse_args(ctx, found.words)
