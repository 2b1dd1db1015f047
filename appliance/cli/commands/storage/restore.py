"""`tailrace restore`: makes a data directory from a backup."""

from __future__ import annotations

import datetime as dt
import time

import click

from appliance.backup.restore import chosen
from appliance.backup.restore import restore as restore_backup
from appliance.backup.target.overlap import refuse_overlap
from appliance.cli.commands.storage.backup import (
    key_option,
    open_store,
    sentences,
    without_password,
)
from appliance.cli.options.shared import PastMoment, json_option
from appliance.cli.output import counted, echo, human_bytes, print_json
from shm.crash_points import arm_from_environment


@click.command()
@click.argument("source", callback=without_password)
@click.argument("data_dir", type=click.Path(file_okay=False))
@click.option("--backup", "backup_id", help="This backup; default: the newest.")
@click.option(
    "--until",
    type=PastMoment(),
    help="The newest backup whose point is not later: no record that was appended after TIME. "
    f"TIME: {PastMoment.help}",
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    help="This topic alone, with its delayed records; may be repeated.",
)
@key_option
@json_option
def command(
    source: str,
    data_dir: str,
    backup_id: str | None,
    until: dt.datetime | None,
    topics: tuple[str, ...],
    key_file: str | None,
    as_json: bool,
) -> None:
    """Make DATA_DIR, which must be empty, from a backup of SOURCE, a directory or a URL. Then start
    an appliance on it.

    \b
    Example:
      tailrace restore /mnt/backup/tailrace /var/lib/tailrace --until 2027-01-31T08:00:00Z
    """
    arm_from_environment()
    if backup_id is not None and until is not None:
        raise click.UsageError("--backup and --until exclude each other: leave one of them out")
    begun = time.monotonic()
    with sentences():
        store = open_store(source, key_file)
        store.check()
        refuse_overlap(store.target.local_path, [data_dir])
        with store.target.reading():
            manifest = chosen(
                store, backup_id, None if until is None else int(until.timestamp() * 1e6)
            )
            written = restore_backup(store, manifest, data_dir, topics)
    seconds = time.monotonic() - begun
    if as_json:
        print_json(
            {
                "backup": manifest.backup_id, "data_dir": data_dir, "bytes": written,
                "partitions": len(manifest.partitions), "seconds": round(seconds, 3),
            }
        )  # fmt: skip
    else:
        echo(
            f"{data_dir} is backup {manifest.backup_id}: "
            f"{counted(len(manifest.partitions), 'partition')}, {human_bytes(written)} in "
            f"{seconds:.1f} s"
        )
