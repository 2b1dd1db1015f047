"""`tailrace uninstall`: removes the service from this host."""

from __future__ import annotations

import os
import sys

import click

from appliance.cli.options.shared import json_option
from appliance.cli.output import echo
from appliance.cli.service.report import end_by, finish, report, run_commands
from appliance.install import host, instances, plan, removal
from appliance.install.apply import Action, Step
from appliance.install.plan import PlannedFile
from appliance.install.record import Record
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from tailrace.core.errors import InvalidSettingError


@click.command()
@click.option("--instance", metavar="NAME", help="Only this instance; the rest stays installed.")
@click.option("--purge", is_flag=True, help="Remove configuration, data and user, too, for good.")
@click.option("--yes", is_flag=True, help="With --purge: do not ask.")
@click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@click.option(
    "--root", default="/", metavar="DIR", help="Remove from the files of another system, in DIR."
)
@json_option
def command(
    instance: str | None, purge: bool, yes: bool, dry_run: bool, root: str, as_json: bool
) -> None:
    """Stop the service and remove what `tailrace install` has installed. Configuration and data
    stay, unless they are purged.

    \b
    Example:
      sudo tailrace uninstall
      sudo tailrace uninstall --instance staging --purge

    \b
    Exit status:
       0  done, or there was nothing to do
       1  failed half way, or not root; running it again completes it
       2  an option is wrong
      74  this machine has no systemd, or a read-only file system
    """
    root = "" if os.path.realpath(root) == "/" else os.path.realpath(root)
    try:
        if instance is not None:
            instances.check_name(instance)
        if not dry_run:
            host.refuse_unfit_host(root, [plan.CONFIGURATION, plan.ADMINISTRATOR.units])
    except InvalidSettingError as error:
        end_by(Halt(ExitCode.USAGE, error.detail))
    except Halt as halt:
        end_by(halt)
    record = Record.read(root)
    names = instances.installed_names(root) if instance is None else [instance]
    steps = removal.plan_removal(root, record) if instance is None else []
    purged = removal.purged_paths(root, names) if purge else []
    steps += [Step(PlannedFile(path, ""), Action.REMOVE, "for good") for path in purged]
    commands = [] if root else removal.service_commands(names if record.files else [])
    if purged and not dry_run and not yes:
        _ask(purged)
    failures = []
    if not dry_run:
        failures = run_commands(commands)
        if failures:  # nothing goes while a service may run
            finish(failures)
        if instance is None:
            removal.remove_files(root, [step for step in steps if step.note != "for good"])
        removal.purge(root, purged)
        if not root:
            failures = run_commands([["systemctl", "daemon-reload"]])
            if purge and instance is None:
                failures += removal.remove_user()
    report(steps, commands, "nothing is installed here", is_dry=dry_run, as_json=as_json)
    finish(failures)
    kept = removal.purged_paths(root, names)
    if kept and not as_json and not dry_run:
        echo(f"kept: {', '.join(kept)} (remove them with `tailrace uninstall --purge`)")


def _ask(paths: list[str]) -> None:
    """Ask before data is removed.

    Raises: Abort, UsageError where nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise click.UsageError(f"--purge removes {', '.join(paths)} for good; confirm with --yes")
    click.confirm(f"Remove {', '.join(paths)} for good?", abort=True)
