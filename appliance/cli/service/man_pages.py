"""Manual pages of the command line, made from its help: one page for each command.

The commands of a group such as `tailrace topic` are sections of the group's page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

NO_WRAP = "\b"
"""Line of a docstring behind which click leaves a paragraph's lines as they are."""


def man_pages(root: click.Group, version: str) -> dict[str, str]:
    """Name of the file -> page, in section 1."""
    context = click.Context(root, info_name="tailrace", **root.context_settings)
    names = root.list_commands(context)
    pages = {"tailrace.1": _page(context, root, version, names)}
    for name in names:
        command = root.get_command(context, name)
        assert command is not None
        child = click.Context(command, info_name=name, parent=context)
        pages[f"tailrace-{name}.1"] = _page(child, command, version, names)
    return pages


def _page(context: click.Context, command: click.Command, version: str, names: list[str]) -> str:
    title = context.command_path.replace(" ", "-")
    summary = command.get_short_help_str(200).rstrip(".")
    lines = [
        f'.TH "{title.upper()}" "1" "" "Tailrace {version}" "Tailrace"',
        ".SH NAME",
        f"{title} \\- {_escaped(summary)}",
        *_body(context, command, ".SH"),
    ]
    if isinstance(command, click.Group):
        lines += _commands(context, command, is_root=context.parent is None)
    others = [name for name in names if f"tailrace-{name}" != title]
    pages = ["tailrace", *(f"tailrace-{name}" for name in others)]
    lines += [
        ".SH SEE ALSO",
        ",\n".join(f".BR {_escaped(page)} (1)" for page in pages if page != title),
    ]
    return "\n".join(lines).replace("(1),\n", "(1) ,\n") + "\n"


def _commands(context: click.Context, group: click.Group, *, is_root: bool) -> Iterator[str]:
    yield ".SH COMMANDS"
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        child = click.Context(command, info_name=name, parent=context)
        if is_root:
            yield from (
                ".TP", f"\\fBtailrace {_escaped(name)}\\fR",
                _escaped(command.get_short_help_str(200)),
            )  # fmt: skip
        else:
            yield f".SS {_escaped(child.command_path)}"
            yield from _body(child, command, ".PP\n.B")


def _body(context: click.Context, command: click.Command, heading: str) -> Iterator[str]:
    """Synopsis, description and options."""
    if heading == ".SH":
        yield ".SH SYNOPSIS"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"\\fB{_escaped(context.command_path)}\\fR {_escaped(pieces)}"
    if heading == ".SH":
        yield ".SH DESCRIPTION"
    else:
        yield ".PP"
    yield from _paragraphs(command.help or "")
    records = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    if records:
        yield f"{heading} OPTIONS" if heading == ".SH" else ".PP"
    for names, text in records:
        yield from (".TP", f"\\fB{_escaped(names)}\\fR", _escaped(" ".join(text.split())))


def _paragraphs(text: str) -> Iterator[str]:
    """A docstring as roff."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
        if number:
            yield ".PP"
        lines = paragraph.splitlines()
        if lines[:1] and lines[0].strip() == NO_WRAP:
            yield from (".nf", *(_escaped(line) for line in lines[1:]), ".fi")
        else:
            yield _escaped(" ".join(line.strip() for line in lines))


def _escaped(text: str) -> str:
    """Text without a meaning for roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith((".", "'")) else text
