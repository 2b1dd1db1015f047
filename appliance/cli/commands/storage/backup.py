"""`tailrace backup`: makes, lists and verifies backups."""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from appliance.backup.backup import locked_backup, make_backup
from appliance.backup.encryption import Cipher, read_key
from appliance.backup.errors import BackupError
from appliance.backup.manifest import Manifest
from appliance.backup.recorded import recorded
from appliance.backup.source.point import Source
from appliance.backup.target.object_store import ObjectStore, open_target
from appliance.backup.target.overlap import refuse_overlap
from appliance.backup.verify import verify as verify_backups
from appliance.cli.options.appliance_control import control_directory, data_dir_option
from appliance.cli.options.default_command import DefaultGroup
from appliance.cli.options.shared import Duration, bootstrap_option, json_option
from appliance.cli.output import (
    BYTES,
    complain,
    counted,
    echo,
    human_bytes,
    print_json,
    print_table,
    progress,
    utc_time,
)
from appliance.config.passwords_in_urls import has_password
from shm.crash_points import arm_from_environment

KEPT_WHILE_FOLLOWING = 100
NICENESS = 10
"""Added to that of a process that follows: where every core is in use, producers go first."""
Function = TypeVar("Function", bound=Callable[..., Any])


@click.group(cls=DefaultGroup, subcommand_metavar="TARGET [ARGS]... | COMMAND [ARGS]...")
def command() -> None:
    """Make, list and verify backups: of topics, groups, transactions and delayed records, at one
    point. TARGET is a directory, or a URL of fsspec such as s3://bucket/path.

    \b
    Example:
      tailrace backup /mnt/backup/tailrace
      tailrace backup s3://backups/tailrace --key-file /etc/tailrace/backup.key --keep 30
      tailrace backup list /mnt/backup/tailrace
    """


def key_option(function: Function) -> Function:
    """Add the option --key-file."""
    return click.option(
        "--key-file",
        type=click.Path(dir_okay=False),
        help="Key of an encrypted target: a file with 32 bytes, or their hexadecimal digits.",
    )(function)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn errors of backups into those of the command line."""
    try:
        yield
    except BackupError as error:
        raise click.ClickException(str(error)) from None


def without_password(_ctx: click.Context, _parameter: click.Parameter, url: Any) -> Any:
    """Refuse a target whose URL has a password."""
    if isinstance(url, str) and has_password(url):
        raise click.BadParameter(
            "the URL has a password, which every account of this host would see in the list of "
            "processes. Write it as backup.target in a file for --config, or give it to the driver "
            "(FSSPEC_SFTP_PASSWORD for sftp://, and so on)"
        )
    return url


def open_store(target: str, key_file: str | None) -> ObjectStore:
    """The backups at a target. Raises BackupError, OSError."""
    cipher = Cipher(read_key(key_file)) if key_file else None
    return ObjectStore(open_target(target), cipher)


@command.command()
@click.argument("target", required=False, callback=without_password)
@data_dir_option
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    help="Take the data directory, and what else is not given, from this configuration: "
    "backup.target, backup.key_file and backup.keep.",
)
@key_option
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    help=f"Remove all but the newest backups; default: keep all, {KEPT_WHILE_FOLLOWING} with "
    "--follow.",
)
@click.option("--follow", is_flag=True, help="Go on: make a backup at each interval.")
@click.option("--interval", type=Duration(), default="10s", show_default=True, help="Of --follow.")
@click.option(
    "--copy",
    "is_copied",
    is_flag=True,
    help="Copy segments also where the target could share their blocks (reflink, hard link).",
)
@bootstrap_option
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    target: str | None,
    data_dir: str | None,
    config: str | None,
    key_file: str | None,
    keep: int | None,
    follow: bool,
    interval: dt.timedelta,
    is_copied: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Make a backup, of a running appliance of this host or of a stopped data directory, and send
    only what the target does not have.

    \b
    Example:
      tailrace backup run /mnt/backup/tailrace --data-dir /var/lib/tailrace --keep 30
    """
    arm_from_environment()
    if config is not None:
        from appliance.config.settings_sources import environment_settings, load_settings

        settings = load_settings(config, environment_settings(), [])
        data_dir = data_dir or settings.data_dirs[0]
        target = target or settings.backup_target
        key_file = key_file or settings.backup_key_file or None
        keep = keep or settings.backup_keep or None
    if not target:
        if config is not None:
            echo("backup.target is not set: no backup is made")
            return
        raise click.UsageError("give TARGET, a directory or a URL, or --config FILE")
    with sentences():
        store = open_store(target, key_file)
        source = Source(control_directory(data_dir, bootstrap))
        try:
            refuse_overlap(store.target.local_path, source.directories())
            if follow:
                if not source.is_running:
                    raise BackupError(
                        f"no appliance runs on {source.data_dir}: start it, then follow it."
                    )
                _follow(
                    source, store, keep or KEPT_WHILE_FOLLOWING, interval, not is_copied, as_json
                )
            manifest, removed = locked_backup(source, store, may_share=not is_copied, keep=keep)
        finally:
            source.close()
    for warning in manifest.warnings:
        complain(warning)
    if as_json:
        print_json({**_row(manifest), "removed": removed, "warnings": manifest.warnings})
    else:
        echo(_sentence(manifest) + (f"; {counted(removed, 'old backup')} removed" * bool(removed)))
    ctx.exit(1 if manifest.warnings else 0)


def _follow(
    source: Source,
    store: ObjectStore,
    keep: int,
    interval: dt.timedelta,
    may_share: bool,
    as_json: bool,
) -> None:
    """Make backups until the process is ended. Raises BackupError if the first one fails."""
    import orjson

    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleans up
    store.target.lock()
    try:
        store.begin(source.instance)
        previous = store.newest()
        is_first = True
        while True:
            begun_s = time.monotonic()
            try:
                with recorded(source.data_dir, str(store.target)) as attempt:
                    previous = make_backup(source, store, previous, may_share=may_share)
                    attempt.made = previous
                    removed = store.keep(keep)
            except (BackupError, OSError) as error:
                if is_first:
                    raise
                behind_s = time.time() - previous.point_us / 1e6 if previous is not None else 0.0
                complain(f"{error} The newest backup is {behind_s:.0f} s behind.")
            else:
                for warning in previous.warnings:
                    complain(warning)
                behind_s = time.time() - previous.point_us / 1e6
                row = {**_row(previous), "removed": removed, "seconds_behind": round(behind_s, 3)}
                if as_json:
                    click.echo(orjson.dumps(row))
                else:
                    click.echo(f"{_sentence(previous)}; {behind_s:.1f} s behind")
                is_first = False
            time.sleep(max(0.0, interval.total_seconds() - (time.monotonic() - begun_s)))
    finally:
        store.target.unlock()


@command.command(name="list")
@click.argument("target", callback=without_password)
@key_option
@json_option
def list_(target: str, key_file: str | None, as_json: bool) -> None:
    """List the backups of a target, the oldest first.

    \b
    Example:
      tailrace backup list /mnt/backup/tailrace --json
    """
    rows, damaged = [], []
    with sentences():
        store = open_store(target, key_file)
        store.check()
        for backup_id in store.backup_ids():
            try:
                rows.append(_row(store.manifest(backup_id)))
            except BackupError as error:
                damaged.append(str(error))
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["BACKUP", "POINT", "TOPICS", "RECORDS TO OFFSET", "SIZE", "SENT"],
            [
                [row["backup"], row["point"], row["topics"], row["offsets"],
                human_bytes(row["bytes"]), human_bytes(row["sent_bytes"])]
                for row in rows
            ],
        )  # fmt: skip
    else:
        echo(f"no backups at {store.target}")
    for sentence in damaged:
        complain(sentence)


@command.command()
@click.argument("target", callback=without_password)
@click.argument("backup", required=False)
@click.option("--all", "is_all", is_flag=True, help="All backups, not the newest alone.")
@key_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    target: str,
    backup: str | None,
    is_all: bool,
    key_file: str | None,
    as_json: bool,
) -> None:
    """Read everything that BACKUP, the newest one by default, needs for a restore, and check it.

    Exit status 0: intact; 1: damaged.

    \b
    Example:
      tailrace backup verify /mnt/backup/tailrace --all
    """
    with sentences():
        store = open_store(target, key_file)
        store.check()
        ids = store.backup_ids()
        if not ids:
            raise BackupError(f"there are no backups at {target}.")
        if not is_all:
            ids = [backup or ids[-1]]
        with store.target.reading(), progress("verifying", None, BYTES) as bar:
            findings = list(verify_backups(store, ids, bar.advance))
    if as_json:
        print_json(
            {
                "backups": ids,
                "findings": [{"backup": each.backup_id, "finding": each.text} for each in findings],
            }
        )
    elif findings:
        print_table(
            ["BACKUP", "FINDING"],
            [[each.backup_id, each.text] for each in findings],
            wrap=["FINDING"],
        )
    if not as_json:
        state = "damaged" if findings else "intact"
        echo(f"{counted(len(ids), 'backup')}: {state}")
    ctx.exit(1 if findings else 0)


def _row(manifest: Manifest) -> dict[str, Any]:
    return {
        "backup": manifest.backup_id,
        "point": utc_time(manifest.point_us / 1e6, "milliseconds"),
        "point_us": manifest.point_us,
        "version": manifest.version,
        "topics": len({entry.topic_id for entry in manifest.partitions}),
        "partitions": len(manifest.partitions),
        "offsets": sum(entry.end for entry in manifest.partitions),
        "bytes": sum(entry.size for entry in manifest.partitions),
        "sent_bytes": manifest.sent_bytes,
    }


def _sentence(manifest: Manifest) -> str:
    row = _row(manifest)
    return (
        f"backup {manifest.backup_id}: {counted(row['topics'], 'topic')}, "
        f"{human_bytes(row['bytes'])}, {human_bytes(row['sent_bytes'])} sent"
    )
