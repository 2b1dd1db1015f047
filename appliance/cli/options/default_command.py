"""A group of commands of which one needs no name."""

from __future__ import annotations

import click


class DefaultGroup(click.Group):
    """`tailrace backup TARGET` is `tailrace backup run TARGET`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the name of the command if the first argument is none."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)
