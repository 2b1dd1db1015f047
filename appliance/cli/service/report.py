"""Report of an installation or a removal, and the running of its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from appliance.cli.output import complain, counted, echo, print_json, print_table
from appliance.install.apply import CHANGES, Action, Step
from appliance.install.host import run_command
from appliance.supervise.processes.restart_policy import ExitCode, Halt

TOLERATED = ("sysctl",)
"""Commands that containers refuse; the files take effect with the next boot."""
LONG = ("/man1/", "completion", "/zsh/", "/fish/")
"""Parts of paths of generated documents, whose text a dry run does not print."""


def end_by(halt: Halt) -> NoReturn:
    """Print the reason and end with its exit status."""
    complain(halt.reason if halt.reason.endswith((".", ")")) else f"{halt.reason}.")
    sys.exit(halt.code)


def run_commands(commands: Sequence[list[str]]) -> list[str]:
    """Run each command; sentences about those that failed."""
    failures = []
    for command in commands:
        reason = run_command(command)
        if not reason:
            continue
        if command[0] in TOLERATED:
            echo(f"note: `{' '.join(command)}` failed here ({reason}); a boot will repeat it")
        else:
            failures.append(
                f"`{' '.join(command)}` failed: {reason}. Mend that and run this command again; "
                "it completes what is missing."
            )
    return failures


def report(
    steps: Sequence[Step],
    commands: Sequence[list[str]],
    no_change: str,
    *,
    is_dry: bool,
    as_json: bool,
) -> None:
    """Print what was done, or would be. `no_change` is the sentence for nothing to do."""
    if as_json:
        rows = [
            {"path": s.file.path, "action": s.action.value, "note": s.note,
             "mode": f"{s.file.mode:04o}", "link_to": s.file.link_to, "content": s.file.content}
            for s in steps
        ]  # fmt: skip
        print_json({"dry_run": is_dry, "files": rows, "commands": list(commands)})
        return
    if steps:
        print_table(
            ["FILE", "ACTION", "NOTE"],
            [[step.file.path, step.action.value, step.note or _link(step)] for step in steps],
            wrap=["NOTE"],
        )
    if is_dry:
        _print_contents(steps)
        for command in commands:
            click.echo(f"$ {' '.join(command)}")
    changes = sum(step.action in CHANGES for step in steps)
    if is_dry:
        echo(f"{counted(changes, 'file')} would be changed; nothing was written")
    elif changes:
        echo(f"{counted(changes, 'file')} changed, {len(steps) - changes} unchanged")
    else:
        echo(f"nothing changed: {no_change}")


def _link(step: Step) -> str:
    return f"-> {step.file.link_to}" if step.file.link_to else ""


def _print_contents(steps: Sequence[Step]) -> None:
    """Print the content of each file that would be written. Generated documents are only named."""
    for step in steps:
        file = step.file
        if step.action is Action.UNCHANGED or not file.content:
            continue
        click.echo(f"\n==> {file.path} (root, mode {file.mode:04o})")
        if any(part in file.path for part in LONG):
            click.echo(f"({len(file.content.encode()):,} bytes, generated from the help)")
        else:
            click.echo(file.content.rstrip("\n"))
    click.echo()


def finish(failures: Sequence[str]) -> None:
    """End with the exit status of a failure, if there are any."""
    for failure in failures:
        complain(failure)
    if failures:
        sys.exit(ExitCode.FAILED)
