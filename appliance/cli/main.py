"""Entry point of `tailrace`: finds the command, and turns errors into a sentence and an exit
status.

Exit status: 0 ok, 1 operation failed, 2 usage, 3 appliance not reachable. `serve` has its own table
(`ExitCode` in `appliance.supervise.processes.restart_policy`). A command's module is imported when
the command is called, so that no command pays for another's imports.
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
from shm.runtime.core_dumps import limit_core_dumps
from tailrace.core.errors import NotReachableError, TailraceError

EXIT_FAILED = 1
EXIT_NOT_REACHABLE = 3
EXIT_INTERRUPTED = 130
CONNECT_TIMEOUT_MS = 3_000
COMPLETION_VARIABLE = "_TAILRACE_COMPLETE"
"""Environment variable that is set while a shell asks for completions."""

_COMMANDS = {
    "serve": ("appliance.cli.commands.lifecycle.serve", "Run the appliance in the foreground."),
    "topic": (
        "appliance.cli.commands.topics.topic",
        "Create, list, describe, alter and delete topics.",
    ),
    "produce": (
        "appliance.cli.commands.records.produce",
        "Send lines, or a file's rows, to a topic.",
    ),
    "consume": ("appliance.cli.commands.records.consume", "Read a topic."),
    "sql": ("appliance.cli.commands.records.sql", "Query topics with SQL."),
    "export": (
        "appliance.cli.commands.records.export",
        "Copy a topic into a lake: Parquet, Arrow, Delta, Iceberg.",
    ),
    "migrate": (
        "appliance.cli.commands.records.migrate",
        "Move topics, records and groups from Kafka here, or back.",
    ),
    "group": (
        "appliance.cli.commands.groups.group",
        "List, describe, reset, delete and advise consumer groups.",
    ),
    "transaction": (
        "appliance.cli.commands.groups.transaction",
        "List, describe and abort transactions.",
    ),
    "delay": (
        "appliance.cli.commands.topics.delay",
        "List, cancel and reschedule delayed records.",
    ),
    "context": (
        "appliance.cli.commands.settings.context",
        "Keep the addresses of appliances under names.",
    ),
    "user": (
        "appliance.cli.commands.users.user",
        "Add, list, change and delete users, and rotate their keys.",
    ),
    "server-key": (
        "appliance.cli.commands.users.server_key",
        "Show the key that proves the appliance to its clients.",
    ),
    "token": (
        "appliance.cli.commands.users.token",
        "Add, list and remove tokens by which scrapers read the metrics.",
    ),
    "acl": ("appliance.cli.commands.users.acl", "Add, list, remove and test rules of access."),
    "perf": ("appliance.cli.perf.command", "Measure throughput and latency, as Kafka's tools do."),
    "log": ("appliance.cli.commands.topics.log", "Show and verify segment files, offline."),
    "doctor": (
        "appliance.cli.commands.monitoring.doctor",
        "Find problems of the host and the appliance.",
    ),
    "layout": (
        "appliance.cli.commands.monitoring.layout",
        "Show which process would run on which cores, here or on paper.",
    ),
    "config": (
        "appliance.cli.commands.settings.config",
        "Show, check, compare and change settings of the appliance.",
    ),
    "audit": (
        "appliance.cli.commands.monitoring.audit",
        "Verify and list the audit log.",
    ),
    "quota": (
        "appliance.cli.commands.settings.quota",
        "Limit what users, client ids and topics take.",
    ),
    "reload": (
        "appliance.cli.commands.lifecycle.reload",
        "Have the appliance read its configuration again.",
    ),
    "status": (
        "appliance.cli.commands.monitoring.status",
        "Show the state of the running appliance.",
    ),
    "top": ("appliance.cli.commands.monitoring.top", "Watch the running appliance."),
    "install": ("appliance.cli.service.install", "Install the appliance as a service."),
    "uninstall": ("appliance.cli.service.uninstall", "Remove the service from this host."),
    "console": ("appliance.cli.commands.monitoring.console", "Print the address of the console."),
    "restart": (
        "appliance.cli.commands.lifecycle.restart",
        "Restart the processes of the appliance, one by one.",
    ),
    "upgrade": (
        "appliance.cli.commands.lifecycle.upgrade",
        "Start the version that is installed now, in place.",
    ),
    "partition": (
        "appliance.cli.commands.storage.partition",
        "Show where partitions are, and move them between disks.",
    ),
    "disk": (
        "appliance.cli.commands.storage.disk",
        "Show the data directories, and empty one.",
    ),
    "backup": (
        "appliance.cli.commands.storage.backup",
        "Make, list and verify backups.",
    ),
    "restore": (
        "appliance.cli.commands.storage.restore",
        "Make a data directory from a backup.",
    ),
    "completion": (
        "appliance.cli.completion",
        "Print a script for shell completion.",
    ),
}


class LazyGroup(click.Group):
    """Commands by name, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of the help text."""
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
        """Names and one-line help of the commands, without importing them."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Format the list of commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command.

        Raises: UsageError, with the nearest name, if there is none.
        """
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
    signal.signal(
        signal.SIGPIPE, signal.SIG_DFL
    )  # `tailrace consume ... | head` ends like any filter
    limit_core_dumps()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command, report an error in a sentence on standard error, and return the exit
    status.
    """
    from appliance.cli.output import complain

    _name_unknown_variables(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code: Any = tailrace.main(arguments, prog_name="tailrace", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(
            error.format_message()
        )  # `tailrace` or `tailrace topic` alone asks for help, which is not an error
        return 0
    except click.ClickException as error:
        complain(_of_other_tools(error) or error.format_message())
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


def _of_other_tools(error: click.ClickException) -> str:
    """A sentence for an option or command that users of other tools expect, "" for other errors."""
    if not isinstance(error, click.NoSuchOption | click.NoSuchCommand):
        return ""
    from appliance.cli.foreign_options import command_meant, option_meant

    return option_meant(error) if isinstance(error, click.NoSuchOption) else command_meant(error)


def _name_unknown_variables(arguments: list[str]) -> None:
    """Warn of TAILRACE_... variables that name no setting: a misspelt one would have no effect.
    `serve` refuses them itself.
    """
    given = [
        name
        for name in os.environ
        if name.startswith("TAILRACE_") and name not in ("TAILRACE_BOOTSTRAP", "TAILRACE_CONTEXT")
    ]
    if not given or arguments[:1] == ["serve"] or COMPLETION_VARIABLE in os.environ:
        return
    from appliance.cli.output import complain
    from appliance.config.settings_sources import unknown_variable

    for name in given:
        sentence = unknown_variable(name)
        if sentence:
            complain(sentence)


def _sentence(error: OSError) -> str:
    if error.strerror is None:  # a library's error, not the file system's
        return f"{error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{error.strerror}{f' {error.filename}' if error.filename else ''}. Free some "
            "space, or write elsewhere."
        )
    return (
        f"{error.strerror} {error.filename}. Check the path and its permissions."
        if error.filename
        else f"{error.strerror}."
    )


if __name__ == "__main__":
    main()
