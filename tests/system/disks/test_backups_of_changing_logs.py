"""Backups of, and moves over, logs whose segments the cleaner replaces and whose schema changes."""

from __future__ import annotations

import pathlib
import threading

import pyarrow as pa

import tailrace
from tailrace import Admin, NewTopic, Producer
from tests.kit.appliances.backups import back_up, records_in, restore
from tests.kit.appliances.killed_directories import start
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S

COMPACTED = {"cleanup.policy": "compact", "segment.bytes": 1 << 20}
FIRST = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
SECOND = FIRST.append(pa.field("city", pa.string()))


def test_a_backup_over_swaps_of_segments_has_the_latest_of_each_key(
    tmp_path: pathlib.Path,
) -> None:
    """Backups and cleanings alternate, and run beside each other; the last backup is restored."""
    running = start(tmp_path / "data")
    target = tmp_path / "target"
    try:
        with Admin(running.address) as admin, Producer(running.address) as producer:
            admin.create_topics([NewTopic("users", 1, COMPACTED)])
            for generation in range(4):
                for number in range(2_000):
                    value = b"%d" % generation + bytes(1_000)
                    producer.send("users", value, key=b"%d" % (number % 500))
                producer.flush(HANG_LIMIT_S)
                cleaning = threading.Thread(target=admin.compact_topic, args=("users",))
                cleaning.start()
                back_up(running.data_dir, target, "--copy")
                cleaning.join()
                back_up(running.data_dir, target, "--copy")
        assert run(None, "backup", "verify", str(target), "--all").returncode == 0
    finally:
        assert running.stop() == 0
    restore(target, tmp_path / "restored")
    assert records_in(tmp_path / "restored") < 4_000
    rows = tailrace.scan(tmp_path / "restored" / "users", latest=True).read_all()
    assert rows.num_rows == 500
    assert {value.rstrip(b"\0") for value in rows["value"].to_pylist()} == {b"3"}


def test_logs_of_several_schemas_are_restored_and_move(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path / "data", data_dirs=f"{tmp_path}/data,{tmp_path}/second")
    try:
        with Admin(running.address) as admin:
            admin.create_topics(NewTopic("typed", 1, schema=FIRST))
            with Producer(running.address) as producer:
                producer.send_arrow("typed", pa.table({"id": [1], "name": ["a"]}, FIRST))
            admin.alter_topics(schema={"typed": SECOND})
            with Producer(running.address) as producer:
                row = {"id": [2], "name": ["b"], "city": ["c"]}
                producer.send_arrow("typed", pa.table(row, SECOND))
        back_up(running.data_dir, tmp_path / "target")
        run(
            None, "partition", "move", "typed:0", "--to", f"{tmp_path}/second", "--data-dir",
            running.data_dir, "--bootstrap", running.address,
        )  # fmt: skip
        moved = tailrace.scan("typed", bootstrap=running.address).read_all()
        assert moved["city"].to_pylist() == [None, "c"]
    finally:
        assert running.stop() == 0
    restore(tmp_path / "target", tmp_path / "restored")
    found = tailrace.scan(tmp_path / "restored" / "typed").read_all()
    assert found["id"].to_pylist() == [1, 2]
    assert found["city"].to_pylist() == [None, "c"]
