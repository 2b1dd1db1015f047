"""`tailrace topic list --deleted`, `undelete` and `purge`: deleted topics that can come back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.output import echo, human_bytes, print_json, print_table
from tailrace.admin.admin import Admin
from tailrace.core.errors import UnknownTopicError

RETENTION = "topic.delete.retention.ms"
NAMED_MAX = 10
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def shown_duration(duration_ms: int) -> str:
    """A duration in its largest whole unit."""
    for unit_ms, name in _UNITS:
        if duration_ms >= unit_ms:
            return f"{duration_ms // unit_ms} {name}"
    return f"{duration_ms} ms"


def deletions_kept_ms(admin: Admin) -> int:
    """Return the time for which the bin keeps a topic that is deleted now, ms; 0: not at all."""
    rows = admin.config_state()["configs"]
    return next((int(row["value"]) for row in rows if row["name"] == RETENTION), 0)


def list_deleted(bootstrap: str, as_json: bool) -> None:
    """Show the bin."""
    with connect(bootstrap) as admin:
        found = admin.list_deleted_topics()
    if as_json:
        print_json(found)
    elif found:
        print_table(
            ["DELETED TOPIC", "ID", "PARTITIONS", "SIZE", "DELETED", "LEFT"],
            [
                [
                    each["name"],
                    each["topic_id"],
                    each["partitions"],
                    human_bytes(each["bytes"]),
                    each["deleted"][:19] + "Z",
                    "being removed"
                    if each["state"] == "purging"
                    else shown_duration(each["left_ms"]),
                ]
                for each in found
            ],
        )
    else:
        echo(f"no deleted topics are kept; {RETENTION} says how long they would be")


@contextmanager
def _naming_those_kept(admin: Admin) -> Iterator[None]:
    """Name the deleted topics that there are beside an error that one is not there."""
    try:
        yield
    except UnknownTopicError as error:
        names = [each["name"] for each in admin.list_deleted_topics() if each["state"] == "kept"]
        if names:
            shown = ", ".join(names[:NAMED_MAX]) + ", ..." * (len(names) > NAMED_MAX)
            error.advice = f"Those that can come back: {shown}. {error.advice}"
        else:
            error.advice = (
                f"None can come back: {RETENTION} says for how long deleted topics are kept."
            )
        raise


@click.command()
@click.argument("topic", metavar="NAME|ID")
@click.option("--as", "new_name", metavar="NEWNAME", help="Another name, if that one is taken.")
@bootstrap_option
@json_option
def undelete(topic: str, new_name: str | None, bootstrap: str, as_json: bool) -> None:
    """Bring a deleted topic back: records, settings, delayed records, and the offsets that groups
    had committed.

    \b
    Example:
      tailrace topic undelete orders
      tailrace topic undelete orders --as orders-before
    """
    with connect(bootstrap) as admin, _naming_those_kept(admin):
        name = admin.undelete_topic(topic, new_name)
    if as_json:
        print_json({"undeleted": name})
    else:
        echo(f"{name} is back")


@click.command()
@click.argument("topic", metavar="NAME|ID")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed without a terminal.")
@bootstrap_option
@json_option
def purge(topic: str, yes: bool, bootstrap: str, as_json: bool) -> None:
    """Remove a deleted topic for good, to free its space now. It asks first; without a terminal it
    takes --yes.

    \b
    Example:
      tailrace topic purge orders --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"nothing is removed: this would remove the deleted topic {topic} for good, and "
                "there is no terminal to ask on; confirm with --yes"
            )
        click.confirm(f"Remove the deleted topic {topic} for good?", abort=True, err=True)
    with connect(bootstrap) as admin, _naming_those_kept(admin):
        size = admin.purge_topic(topic)
    if as_json:
        print_json({"purged": topic, "bytes": size})
    else:
        echo(f"removed {topic} for good, which frees {human_bytes(size)}")
