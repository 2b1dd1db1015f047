"""`tailrace completion`: prints click's script for shell completion of commands, options, topics
and contexts.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from appliance.cli.main import COMPLETION_VARIABLE

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete commands, options, and the names of topics and
    contexts.

    \b
    Example:
      tailrace completion bash > ~/.local/share/bash-completion/completions/tailrace
      tailrace completion zsh > "${fpath[1]}/_tailrace"
      tailrace completion fish > ~/.config/fish/completions/tailrace.fish
    """
    click.echo(completion_script(ctx.find_root().command, shell))


def completion_script(root: click.Command, shell: str) -> str:
    """The script for a shell, which need not be installed here."""
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    completer = found(root, {}, "tailrace", COMPLETION_VARIABLE)
    return completer.source_template % completer.source_vars()
