"""`tailrace audit`: verify, list and copy the audit log, from its files."""

from __future__ import annotations

import datetime as dt
import sys
import threading
from typing import Any, NoReturn

import click

from appliance.audit.audit_log import read_key
from appliance.audit.verification import read_events, verify
from appliance.cli.options.shared import bootstrap_option
from appliance.cli.output import complain, counted, print_json, print_table

EXIT_BROKEN = 1
EXIT_KEY = 2
COPY_INTERVAL_S = 0.5
"""Interval at which `copy --follow` reads the files."""


@click.group()
def command() -> None:
    """Verify, list and copy the audit log.

    \b
    Example:
      tailrace audit verify /var/lib/tailrace/audit
      tailrace audit list /var/lib/tailrace/audit --user User:alice
    """


@command.command("verify")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--key-file", default="", help="File with the key of the hashes (audit.key_file).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify_(directory: str, key_file: str, as_json: bool) -> None:
    """Find lines that were changed or cut, and files that were removed. Exit status 1 if there are,
    2 if the key is missing or fits no line.

    \b
    Example:
      tailrace audit verify /var/lib/tailrace/audit --key-file /etc/tailrace/audit.key
    """
    try:
        found = verify(directory, read_key(key_file))
    except (OSError, ValueError) as error:
        _cannot_read(directory, error)
    if as_json:
        print_json(
            {"lines": found.lines, "files": found.files, "first": found.first,
             "last": found.last, "findings": found.findings, "key_problem": found.key_problem}
        )  # fmt: skip
    elif found.key_problem:
        complain(f"the audit log was not verified: {found.key_problem}")
    else:
        for sentence in found.findings:
            click.echo(f"problem: {sentence}")
        click.echo(
            f"{counted(found.lines, 'line')} in {counted(found.files, 'file')}, {found.first} to "
            f"{found.last}: {'NOT whole' if found.findings else 'whole'}"
        )
    if found.findings:
        sys.exit(EXIT_KEY if found.key_problem else EXIT_BROKEN)


@command.command("list")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--user", help="Only of this user, alice or User:alice.")
@click.option("--event", help="Only login, request, result, denied or access.")
@click.option("--outcome", help="Only allowed, denied or failed.")
@click.option("--api", help="Only of this API, such as DELETE_TOPICS.")
@click.option("--since", type=click.DateTime(), help="Only from this time on, in UTC.")
@click.option("--tail", type=int, default=0, help="Only the last ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(
    directory: str,
    user: str | None,
    event: str | None,
    outcome: str | None,
    api: str | None,
    since: dt.datetime | None,
    tail: int,
    as_json: bool,
) -> None:
    """List events, oldest first.

    \b
    Example:
      tailrace audit list /var/lib/tailrace/audit --outcome denied --tail 20
    """
    if user is not None and ":" not in user:
        user = f"User:{user}"
    chosen = {"user": user, "event": event, "outcome": outcome, "api": api}
    filters = {name: value for name, value in chosen.items() if value is not None}
    since_us = 0 if since is None else int(since.replace(tzinfo=dt.UTC).timestamp() * 1e6)
    try:
        rows = [
            row
            for row in read_events(directory)
            if row.get("time_us", 0) >= since_us
            and all(row.get(name) == value for name, value in filters.items())
        ]
    except OSError as error:
        _cannot_read(directory, error)
    rows = rows[-tail:] if tail else rows
    if as_json:
        print_json(rows)
        return
    print_table(
        ["SEQ", "TIME", "USER", "FROM", "EVENT", "WHAT", "OUTCOME"],
        [
            [row["seq"], _moment(row), row.get("user", ""), row.get("address", ""), row["event"],
             _subject(row), row.get("code") or row.get("outcome", "")]
            for row in rows
        ],
        wrap=["WHAT"],
    )  # fmt: skip


@command.command("copy")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--topic", required=True, help="A topic with one partition, of its own.")
@click.option("--follow", is_flag=True, help="Go on until it is ended.")
@bootstrap_option
def copy(directory: str, topic: str, follow: bool, bootstrap: str) -> None:
    """Copy the lines into a topic, each once, in order. It goes on where an earlier copy has ended.

    \b
    Example:
      tailrace audit copy /var/lib/tailrace/audit --topic audit --follow
    """
    from appliance.audit.topic_copy import TopicCopy

    pause = threading.Event()
    missing = 0
    copying = TopicCopy(directory, topic, bootstrap)
    try:
        while True:
            count = copying.step()
            if copying.missing > missing:
                missing = copying.missing
                complain(f"{counted(missing, 'line')} had been removed before they were copied")
            if count or not follow:
                click.echo(f"{counted(count, 'line')} copied, up to {copying.copied}")
            if not follow:
                return
            pause.wait(COPY_INTERVAL_S)
    except OSError as error:
        _cannot_read(directory, error)
    finally:
        copying.close()


def _cannot_read(directory: str, error: Exception) -> NoReturn:
    if isinstance(error, OSError):
        complain(
            f"{error.filename or directory} cannot be read: {error.strerror}. The audit log is in "
            "the directory that audit.directory names, else in DATA_DIR/audit"
        )
    else:
        complain(str(error))
    sys.exit(EXIT_BROKEN)


def _moment(row: dict[str, Any]) -> str:
    moment = dt.datetime.fromtimestamp(row.get("time_us", 0) / 1e6, dt.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _subject(row: dict[str, Any]) -> str:
    if "topic" in row:
        return f"{row.get('operation', '')} {row['topic']}"
    request = row.get("request") or {}
    topics = request.get("topics") if isinstance(request, dict) else None
    names = [topic.get("name", "") for topic in topics or [] if isinstance(topic, dict)]
    return " ".join([row.get("api", ""), *map(str, names)]).strip()
