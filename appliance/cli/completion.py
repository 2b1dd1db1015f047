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
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    completer = found(ctx.find_root().command, {}, "tailrace", COMPLETION_VARIABLE)
    click.echo(
        completer.source_template % completer.source_vars()
    )  # `source()` would look for the shell, which need not be installed here
