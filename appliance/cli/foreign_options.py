"""Options and commands of kcat, Kafka's tools and shells, and what to write for them here."""

from __future__ import annotations

import click

_TOPIC = "the topic is an argument: tailrace consume TOPIC, tailrace produce TOPIC"
_ADDRESS = "write --bootstrap ADDRESS"
_MAX = "write --max N"
_WORDS = {
    "-b": _ADDRESS,
    "--bootstrap-server": _ADDRESS,
    "--bootstrap-servers": _ADDRESS,
    "--broker-list": _ADDRESS,
    "-t": _TOPIC,
    "--topic": _TOPIC,
    "-p": "write --partition N",
    "-o": "write --offset N, --from-beginning, --tail N (the last N records) or --since TIME",
    "-c": _MAX,
    "--max-messages": _MAX,
    "-e": "write --from-beginning, --offset, --tail or --since: with one of them tailrace consume "
    "ends at the end of the topic, unless it has --follow",
    "-C": "write tailrace consume TOPIC",
    "-P": "write tailrace produce TOPIC",
    "-L": "write tailrace topic list, or tailrace status",
    "-G": "write --group GROUP",
    "-K": "write --key-separator TEXT",
    "-k": "write --key TEXT",
    "-H": "write --header NAME=VALUE",
    "-J": "write --format json",
    "--command-config": "write settings as options, or TAILRACE_CONTEXT for an address",
}


_SYNONYMS = (
    ("list", "ls"),
    ("describe", "show", "status", "info", "get", "inspect"),
    ("alter", "set", "update", "edit", "change"),
    ("create", "add", "set", "new", "make"),
    ("delete", "remove", "unset", "rm", "del", "drop"),
    ("serve", "start", "run", "up"),
    ("consume", "tail", "cat", "read"),
    ("produce", "publish", "send", "write"),
)
"""Names of the same deed: those that a group may have, and those that users try."""
_WHOLE_COMMANDS = {
    "version": "write tailrace --version",
    "stop": "systemctl stop tailrace, or SIGTERM to `tailrace serve`, stops the appliance",
    "topics": "write tailrace topic list",
    "groups": "write tailrace group list",
}


_GROUPS = ("topic", "group", "user")
"""Groups of commands that are named to users who leave the group out."""


def option_meant(error: click.NoSuchOption) -> str:
    """A sentence for an option that those tools have, "" for others."""
    option, context = error.option_name, error.ctx
    words = _WORDS.get(option, "")
    if context is not None and isinstance(context.command, click.Group):
        name = option.lstrip("-")
        if option.startswith("--") and name in context.command.list_commands(context):
            words = f"write {context.command_path} {name}"
    elif context is not None:
        name = "topic" if words == _TOPIC else option.removeprefix("--")
        if words == _TOPIC and any("--topic" in p.opts for p in context.command.params):
            words = "write --topic TOPIC"
        for argument in context.command.params:
            if isinstance(argument, click.Argument) and _is_named(argument, name, context):
                shown = argument.make_metavar(context).removesuffix("...")
                words = f"the {name} is an argument: {context.command_path} {shown}"
    return f"There is no option {option}; {words}." if words else ""


def _is_named(argument: click.Argument, name: str, context: click.Context) -> bool:
    """An argument `name` of a command of the group `topic` is the topic."""
    group = context.parent.info_name if context.parent is not None else ""
    return argument.name in (name, f"{name}s") or (
        argument.name in ("name", "names") and group == name
    )


def is_word_for_a_command(word: str) -> bool:
    """True for names of commands that other tools have."""
    return any(word in names for names in _SYNONYMS)


def command_meant(error: click.NoSuchCommand) -> str:
    """A sentence for a command that is called otherwise here, "" for others."""
    name, context = error.command_name, error.ctx
    if context is None or not isinstance(context.command, click.Group):
        return ""
    if context.parent is None and name in _WHOLE_COMMANDS:
        return f"There is no command {name}; {_WHOLE_COMMANDS[name]}."
    meant = _same_deed(name, context.command, context)
    if meant:
        return f"There is no command {name}; write {context.command_path} {meant}."
    if context.parent is not None:
        return ""
    found = []
    for group_name in _GROUPS:
        group = context.command.get_command(context, group_name)
        meant = _same_deed(name, group, context) if isinstance(group, click.Group) else ""
        if meant:
            found.append(f"{context.command_path} {group_name} {meant}")
    return f"There is no command {name}; write {' or '.join(found)}." if found else ""


def _same_deed(name: str, group: click.Group, context: click.Context) -> str:
    """The command of a group that does the deed of this name, "" if none does."""
    there = group.list_commands(context)
    meant = (other for names in _SYNONYMS if name in names for other in names if other in there)
    return next(meant, "")
