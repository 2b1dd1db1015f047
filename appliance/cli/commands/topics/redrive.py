"""`tailrace topic redrive`: dead letters are sent again."""

from __future__ import annotations

import click

from appliance.cli.options.shared import bootstrap_option, complete_topics, connect, json_option
from appliance.cli.output import counted, echo, print_json, progress
from tailrace.core.topic_names import dead_letter_name


@click.command()
@click.argument("name", shell_complete=complete_topics)
@click.option(
    "--to", metavar="TOPIC", help="Send all to this topic, instead of where each is from."
)
@bootstrap_option
@json_option
def redrive(name: str, to: str | None, bootstrap: str, as_json: bool) -> None:
    """Send the dead letters of a topic again, each once, to the topic that it comes from.

    The letters stay in the dead-letter topic, and a second run continues behind them.

    \b
    Example:
      tailrace topic redrive orders.dlq
    """
    from appliance.observe.console.redrive import redrive as send_again

    letters = dead_letter_name(name)
    with connect(bootstrap) as admin:
        has_letters = letters in admin.list_topics()
        count = sum(
            partition["records"] or 0
            for partition in admin.describe_topics([name])[name]["partitions"]
        )
    with progress("redrive", count) as shown:
        done = send_again(bootstrap, name, to, shown.advance)
    if as_json:
        print_json({"topic": name, "sent": done.sent, "skipped": done.skipped})
        return
    echo(f"{counted(done.sent, 'record')} sent again")
    if done.skipped:
        echo(f"{counted(done.skipped, 'record')} left: without a value or an origin")
    if has_letters and not done.sent:
        echo(f"the dead letters of {name} are in {letters}: `tailrace topic redrive {letters}`")
