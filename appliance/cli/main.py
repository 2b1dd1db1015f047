"""The entry point `tailrace`: finds the command, turns errors into a sentence and an exit status.

Exit status: 0 ok, 1 operation failed, 2 usage, 3 appliance not reachable; `serve` has its own table (`appliance.restart_policy.ExitCode`).
Commands are loaded when they are called, so that none pays for another's imports.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

import tailrace as client
from tailrace.errors import NotReachableError, TailraceError

EXIT_FAILED = 1
EXIT_NOT_REACHABLE = 3
EXIT_INTERRUPTED = 130
CONNECT_TIMEOUT_MS = 3_000
COMPLETION_VARIABLE = "_TAILRACE_COMPLETE"
"""Set where a shell asks: click looks at it, for which shell asks and what for."""

_COMMANDS = {
    "serve": ("appliance.cli.serve", "Run the appliance in the foreground."),
    "topic": ("appliance.cli.topic", "Create, list, describe, alter and delete topics."),
    "produce": ("appliance.cli.produce", "Send lines, or a file's rows, to a topic."),
    "consume": ("appliance.cli.consume", "Read a topic."),
    "sql": ("appliance.cli.sql", "Query topics with SQL."),
    "export": ("appliance.cli.export", "Copy a topic into a lake: Parquet, Arrow, Delta, Iceberg."),
    "group": ("appliance.cli.group", "List, describe, reset, delete and advise consumer groups."),
    "delay": ("appliance.cli.delay", "List, cancel and reschedule delayed records."),
    "context": ("appliance.cli.context", "Keep the addresses of appliances under names."),
    "perf": ("appliance.cli.perf", "Measure throughput and latency, as Kafka's tools do."),
    "log": ("appliance.cli.log", "Look into segment files and verify them, offline."),
    "doctor": ("appliance.cli.doctor", "Say what would hurt, and what to do about it."),
    "status": ("appliance.cli.status", "Show how the running appliance does."),
    "completion": ("appliance.cli.completion", "Print what makes a shell complete commands, options and topics."),
}


class LazyGroup(click.Group):
    """Commands by name, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are shown."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads the command's module; None when there is no such command."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = importlib.import_module(module).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Names and their sentences, without loading what they name."""
        found = [CompletionItem(name, help=text) for name, (_, text) in _COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without loading them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UsageError, with the nearest name, when there is no such command."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in _COMMANDS:
            raise click.NoSuchCommand(name, possibilities=_COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(client.__version__)
def tailrace() -> None:
    """Tailrace: a message broker appliance for one host.

    \b
    Example:
      tailrace serve --data-dir /var/lib/tailrace &
      tailrace topic create orders --partitions 3
      echo 'u1:hello' | tailrace produce orders --key-separator :
      tailrace consume orders --from-beginning
    """


def main() -> None:
    """Run the command line; ends the process."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `tailrace consume ... | head` ends like any filter
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command, say what went wrong in a sentence on standard error, and return the exit status."""
    from appliance.cli.output import complain

    _name_unknown_variables(arguments)
    try:
        code: Any = tailrace.main(arguments, prog_name="tailrace", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())  # `tailrace` alone, or `tailrace topic`: asked for what there is, which is no error
        return 0
    except click.ClickException as error:
        complain(error.format_message())
        if isinstance(error, click.UsageError) and error.ctx is not None:
            print(f"Try '{error.ctx.command_path} --help'.", file=sys.stderr)
        return error.exit_code
    except NotReachableError as error:
        complain(str(error))
        return EXIT_NOT_REACHABLE
    except TailraceError as error:
        complain(str(error))
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        complain(_sentence(error))
        return EXIT_FAILED


def _name_unknown_variables(arguments: list[str]) -> None:
    """Say which TAILRACE_... variable of the environment is none: misspelt, it would be passed over without a word. `serve` refuses such a one itself."""
    given = [name for name in os.environ if name.startswith("TAILRACE_") and name not in ("TAILRACE_BOOTSTRAP", "TAILRACE_CONTEXT")]
    if not given or arguments[:1] == ["serve"] or COMPLETION_VARIABLE in os.environ:
        return
    from appliance.cli.output import complain
    from appliance.settings import unknown_variable

    for name in given:
        sentence = unknown_variable(name)
        if sentence:
            complain(sentence)


def _sentence(error: OSError) -> str:
    if error.strerror is None:  # not of the file system: a library's
        return f"{error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}{f' {error.filename}' if error.filename else ''}. Free some space, or write elsewhere."
    return f"{error.strerror} {error.filename}. Check the path and its permissions." if error.filename else f"{error.strerror}."


if __name__ == "__main__":
    main()
