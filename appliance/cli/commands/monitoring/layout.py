"""`tailrace layout`: the cores of each process, on this host or on paper. A start uses the same
function (`appliance.config.core_plan`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click

from appliance.cli.options.config_sources import config_path, file_options, set_option
from appliance.cli.options.shared import json_option
from appliance.cli.output import counted, print_json, print_table
from appliance.config.core_plan import CorePlan
from appliance.config.relations import planned_cores
from appliance.config.settings import Settings
from appliance.config.settings_sources import Given, gather_settings, settings_of
from appliance.config.topology import (
    LSCPU,
    Topology,
    on_paper,
    parse_list,
    parse_lscpu,
    read_topology,
)
from tailrace.core.errors import InvalidSettingError

NOT_STARTED_FIRST = ("scheduler-0", "groups-0", "console")
"""Processes without cores of their own, beside the controller."""


@click.command()
@file_options
@set_option
@click.option("--cores", type=int, help="Cores of a host on paper, as Linux counts them.")
@click.option("--smt", type=int, default=1, show_default=True, help="Threads of a physical core.")
@click.option("--numa", type=int, default=1, show_default=True, help="NUMA nodes.")
@click.option("--isolated", default="", metavar="LIST", help="Isolated cores, such as 4-7,12.")
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help=f"Another host's cores: what `{LSCPU}` printed there.",
)
@json_option
def command(
    config: str | None, instance: str | None, no_config: bool, assignments: tuple[str, ...],
    cores: int | None, smt: int, numa: int, isolated: str, topology: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show which process runs on which cores, with these settings.

    Without --cores or --topology: on this host, within the cores that this process may use.

    \b
    Example:
      tailrace layout
      tailrace layout --cores 64 --smt 2 --numa 2
      tailrace layout --cores 16 --set fronts=2 --set data_dirs=/disk1,/disk2
    """
    host = _host(cores, smt, numa, isolated, topology)
    settings = _settings(config_path(config, instance, no_config), assignments)
    try:
        plan = planned_cores(settings, host)
        busy = settings.busy_poll(plan)
    except InvalidSettingError as error:
        raise click.ClickException(error.detail) from None
    rows = list(_rows(plan, host))
    used = {core for row in rows for core in row["cores"] or ()}
    unused = [cpu.number for cpu in host.cpus if cpu.number not in used] if used else []
    if as_json:
        print_json(
            {
                "cores": [cpu._asdict() for cpu in host.cpus], "quota_cores": host.quota_cores,
                "processes": rows, "unused": unused, "busy_poll_us": busy.us,
            }
        )  # fmt: skip
        return
    print_table(
        ["PROCESS", "CORES", "PHYSICAL", "NODE"],
        [
            [
                row["process"],
                ranges(row["cores"]) if row["cores"] else "any",
                ranges(row["physical_cores"]) if row["cores"] else "",
                ranges(row["nodes"]) if row["cores"] else "",
            ]
            for row in rows
        ],
    )
    quota = f", {host.quota_cores:g} by quota" if host.quota_cores is not None else ""
    physical = counted(len({cpu.core for cpu in host.cpus}), "physical core")
    nodes = counted(len({cpu.node for cpu in host.cpus}), "node")
    click.echo(f"\n{counted(len(host.cpus), 'core')}{quota}, {physical}, {nodes}")
    if unused:
        click.echo(f"no process: cores {ranges(unused)}")
    polls = f"poll for {busy.us} us before they sleep" if busy.us else "sleep at once"
    click.echo(f"fronts and workers {polls}: {busy.reason}")


def _host(cores: int | None, smt: int, numa: int, isolated: str, topology: str | None) -> Topology:
    if cores is not None and topology is not None:
        raise click.UsageError("give one of --cores and --topology")
    try:
        apart = parse_list(isolated)
    except ValueError:
        raise click.UsageError(f"--isolated is {isolated!r}; write 4-7,12") from None
    if topology is not None:
        with open(topology, encoding="utf-8", errors="replace") as file:
            host = parse_lscpu(file.read())
        return host._replace(
            cpus=tuple(
                cpu._replace(is_isolated=cpu.number in apart, is_reserved=cpu.number in apart)
                for cpu in host.cpus
            )
        )
    if cores is not None:
        return on_paper(cores, smt, numa, apart)
    if (smt, numa, apart) != (1, 1, []):
        raise click.UsageError("--smt, --numa and --isolated need --cores")
    return read_topology()


def _settings(path: str | None, assignments: tuple[str, ...]) -> Settings:
    from appliance.cli.options.shared import parse_pairs

    problems: list[Any] = []
    flags = list(parse_pairs(assignments, "--set").items())
    given: dict[str, Given] = gather_settings(path, os.environ, flags, problems)
    settings = settings_of(given, problems)
    if problems:
        raise click.UsageError("\n".join(map(str, problems)))
    return settings


def _rows(plan: CorePlan, host: Topology) -> Iterator[dict[str, Any]]:
    from appliance.supervise.processes.child_processes import first_children, other_cores

    by_number = {cpu.number: cpu for cpu in host.cpus}
    found = [(child.name, child.cores) for child in first_children(plan)]
    found += [(name, other_cores(plan)) for name in NOT_STARTED_FIRST]
    order = {"front": 0, "flusher": 1, "worker": 2}
    for name, cores in sorted(found, key=lambda row: order.get(row[0].partition("-")[0], 3)):
        yield {
            "process": name,
            "cores": cores,
            "physical_cores": sorted({by_number[core].core for core in cores or ()}),
            "nodes": sorted({by_number[core].node for core in cores or ()}),
        }


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
