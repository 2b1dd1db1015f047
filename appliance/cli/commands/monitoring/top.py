"""`tailrace top`: the running appliance, live: what is wrong, rates, latencies, topics, groups,
processes.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from appliance.cli.options.shared import Duration, bootstrap_option, connect, json_option
from appliance.cli.output import print_json
from appliance.cli.top.frame import SORTS, Line, frame
from appliance.cli.top.keyboard import keyboard
from appliance.observe.overview.overview import Moment, Watch, overview

KEYS = {"r": "rate", "s": "size", "n": "name"}
HELP = "r: topics by rate   s: by size   n: by name   q: quit"


@click.command()
@click.option("--once", is_flag=True, help="Print one frame, and end.")
@click.option(
    "--interval",
    type=Duration(),
    default="2s",
    show_default=True,
    help="Time between two frames, which rates and latencies are about.",
)
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="rate", show_default=True,
    help="Order of the topics.",
)  # fmt: skip
@bootstrap_option
@json_option
def command(once: bool, interval: timedelta, sort: str, bootstrap: str, as_json: bool) -> None:
    """Watch the running appliance: what is wrong first, then rates, latency percentiles, topics by
    rate, groups by lag, and processes with cores, CPU and memory.

    In a pipe, with --once or with --json, it prints one frame. Latencies, CPU and memory are shown
    to root and the appliance's user on its host.

    \b
    Example:
      tailrace top
      tailrace top --once --json | jq .latencies
    """
    with connect(bootstrap) as admin:
        watch = Watch(admin)
        try:
            before = watch.take()
            if as_json or once or not _can_draw():
                time.sleep(interval.total_seconds())
                state = overview(before, watch.take())
                if as_json:
                    print_json(state)
                else:
                    lines = frame(state, bootstrap, sort, None)
                    click.echo("\n".join(line.text for line in lines).rstrip())
                return
            _live(watch, before, interval.total_seconds(), bootstrap, sort)
        finally:
            watch.close()


def _live(watch: Watch, before: Moment, interval_s: float, address: str, sort: str) -> None:
    """Draw until the user quits. A key draws what is known in another order."""
    console = Console()
    state = overview(before, before)
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = frame(state, address, sort, console.height - 2)
            live.update(_text([*lines, Line(HELP, "dim")]), refresh=True)
            pressed = keys.wait(interval_s)
            if pressed == "q":
                return
            sort = KEYS.get(pressed, sort)
            if not pressed:
                after = watch.take()
                state, before = overview(before, after), after


def _can_draw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _text(lines: list[Line]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for line in lines:
        text.append(f"{line.text}\n", style=line.style)
    return text
