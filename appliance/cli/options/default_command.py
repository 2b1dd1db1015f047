"""A group of commands of which one needs no name."""

from __future__ import annotations

import difflib
import os

import click

from appliance.cli.foreign_options import is_word_for_a_command


class DefaultGroup(click.Group):
    """`tailrace backup TARGET` is `tailrace backup run TARGET`. A word that is meant for another
    command, such as `ls`, is never taken for a target.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the name of the command if the first argument is none. Raises NoSuchCommand."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            if self._is_meant_for_a_command(args[0]):
                raise click.NoSuchCommand(args[0], possibilities=self.commands, ctx=ctx)
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def _is_meant_for_a_command(self, word: str) -> bool:
        """A path with a slash, or a name that is there, is a target."""
        if not word.isalpha() or os.path.lexists(word):
            return False
        return is_word_for_a_command(word) or bool(
            difflib.get_close_matches(word, self.commands, cutoff=0.75)
        )
