"""`tailrace install`: the appliance as a service of this host."""

from __future__ import annotations

import os
import sys
import sysconfig

import click

from appliance.cli.completion import completion_script
from appliance.cli.main import tailrace
from appliance.cli.options.shared import json_option
from appliance.cli.output import echo
from appliance.cli.service.man_pages import man_pages
from appliance.cli.service.report import end_by, finish, report, run_commands
from appliance.config.files.default_file import default_file
from appliance.install import apply, host, instances, plan
from appliance.install.record import PATH, Record
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from tailrace import __version__, launcher
from tailrace.core.errors import InvalidSettingError


@click.command()
@click.option("--instance", metavar="NAME", help="Another appliance of this host, with a name.")
@click.option("--dry-run", is_flag=True, help="Print every file and command; change nothing.")
@click.option(
    "--root", default="/", metavar="DIR", help="Install into the files of another system, in DIR."
)
@click.option(
    "--package", is_flag=True, help="With --root: only the files of a distribution's package."
)
@json_option
def command(instance: str | None, dry_run: bool, root: str, package: bool, as_json: bool) -> None:
    """Install the appliance as a service: user, directories, a configuration with every setting,
    systemd units, kernel settings and limits, shell completion, manual pages.

    A second run changes nothing, and says so. A configuration that you changed is kept. Nothing is
    started.

    \b
    Example:
      sudo /opt/tailrace/bin/tailrace install
      sudo tailrace install --instance staging --dry-run

    \b
    Exit status:
       0  done, or there was nothing to do
       1  failed half way, or not root; running it again completes it
       2  an option is wrong
      74  this machine cannot have the service: no systemd, a read-only file
          system, a program that the service cannot read
    """
    root = "" if os.path.realpath(root) == "/" else os.path.realpath(root)
    if package and not root:
        raise click.UsageError("--package needs --root")
    layout = plan.PACKAGE if package else plan.ADMINISTRATOR
    try:
        files = planned_files(instance, root, layout)
    except InvalidSettingError as error:
        end_by(Halt(ExitCode.USAGE, error.detail))
    refusal = _refusal(files, root, layout)
    if refusal is not None and not dry_run:
        end_by(refusal)
    record = Record.read(root)
    steps = apply.decide(files, root, record)
    commands = [] if package else host.commands(
        root, f"{layout.sysusers}/tailrace.conf", f"{layout.tmpfiles}/tailrace.conf",
        f"{layout.sysctl}/60-tailrace.conf",
    )  # fmt: skip
    failures = []
    if not dry_run:
        record.version = __version__
        apply.perform(steps, root, record)
        if package:
            apply.remove(os.path.join(root, PATH))
        failures = run_commands(commands)
    report(steps, commands, "everything is installed", is_dry=dry_run, as_json=as_json)
    finish(failures)
    if refusal is not None:
        end_by(refusal)
    if not (dry_run or as_json or root):
        unit = "tailrace" if instance is None else f"tailrace@{instance}"
        echo(f"Start it, now and at each boot: systemctl enable --now {unit}")


def planned_files(instance: str | None, root: str, layout: plan.Layout) -> list[plan.PlannedFile]:
    """Every file of the installation.

    Raises: InvalidSettingError.
    """
    name = instances.DEFAULT if instance is None else instances.check_name(instance)
    return plan.plan_files(
        os.path.join(launcher.server_root() or "", "systemd"),
        _program() if layout is plan.ADMINISTRATOR else plan.PACKAGED_PROGRAM,
        _instance(name, root),
        plan.Documents(
            man_pages(tailrace, __version__),
            *(completion_script(tailrace, shell) for shell in ("bash", "zsh", "fish")),
        ),
        layout,
    )


def _program() -> str:
    return os.path.join(sysconfig.get_path("scripts"), "tailrace")


def _refusal(files: list[plan.PlannedFile], root: str, layout: plan.Layout) -> Halt | None:
    """The reason why this host cannot have the service."""
    try:
        host.refuse_unfit_host(root, sorted({os.path.dirname(file.path) for file in files}))
        if not root and layout is plan.ADMINISTRATOR:
            host.refuse_hidden_program([_program(), sys.prefix, sys.base_prefix])
    except Halt as halt:
        return halt
    return None


def _instance(name: str, root: str) -> instances.Instance:
    path = f"{plan.CONFIGURATION}/{name}.toml"
    others = []
    for other in instances.installed_names(root):
        if other != name:
            others.append(apply.read_text(f"{root}{plan.CONFIGURATION}/{other}.toml") or "")
    settings = instances.settings_of_instance(name, others)
    return instances.Instance(name, path, str(settings["data_dirs"]), default_file(settings))
