"""The entry point `tailrace`: finds the command, turns errors into a sentence and an exit status.

Exit status: 0 ok, 1 operation failed, 2 usage, 3 appliance not reachable; `serve` has its own table (`appliance.restart_policy.ExitCode`).
Commands are loaded when they are called, so that none pays for another's imports.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import click

import tailrace as client
from tailrace.errors import NotReachableError, TailraceError

EXIT_FAILED = 1
EXIT_NOT_REACHABLE = 3
CONNECT_TIMEOUT_MS = 3_000

_COMMANDS = {
    "serve": ("appliance.cli.serve", "Run the appliance in the foreground."),
    "topic": ("appliance.cli.topic", "Create, list, describe, alter and delete topics."),
    "produce": ("appliance.cli.produce", "Send lines, or a file's rows, to a topic."),
    "consume": ("appliance.cli.consume", "Read a topic."),
    "delay": ("appliance.cli.delay", "List, cancel and reschedule delayed records."),
    "perf": ("appliance.cli.perf", "Measure throughput and latency, as Kafka's tools do."),
    "log": ("appliance.cli.log", "Look into segment files and verify them, offline."),
    "doctor": ("appliance.cli.doctor", "Say what would hurt, and what to do about it."),
    "status": ("appliance.cli.status", "Show how the running appliance does."),
}


class LazyGroup(click.Group):
    """Commands by name, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
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
    from appliance.cli.output import complain

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `tailrace consume ... | head` ends like any filter
    try:
        code: Any = tailrace.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())  # `tailrace` alone, or `tailrace topic`: asked for what there is, which is no error
        sys.exit(0)
    except click.ClickException as error:
        complain(error.format_message())
        if isinstance(error, click.UsageError) and error.ctx is not None:
            print(f"Try '{error.ctx.command_path} --help'.", file=sys.stderr)
        sys.exit(error.exit_code)
    except NotReachableError as error:
        complain(str(error))
        sys.exit(EXIT_NOT_REACHABLE)
    except TailraceError as error:
        complain(str(error))
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        complain(f"{error.strerror}{where}. Check the path and its permissions.")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
