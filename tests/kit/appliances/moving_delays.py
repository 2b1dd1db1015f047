"""Topics with delays of a test's appliance that move between its two data directories."""

from __future__ import annotations

import datetime as dt
import pathlib
import threading
from collections import Counter
from contextlib import suppress

from tailrace import Admin, Consumer, NewTopic, Producer, TailraceError, TopicPartition
from tailrace.core.errors import UnknownTopicError
from tailrace.format.directory.delay_files import PENDING_FILE, Manifest
from tests.kit.appliances.moves import Addressed, move, where
from tests.kit.processes import HANG_LIMIT_S, wait_until

HOUR = dt.timedelta(hours=1)
FAR_BYTES = 64 << 10
FAR_COUNT = 300
"""Enough for bucket files: unsaved rows of 16 MiB are saved at once."""


def create(appliance: Addressed, **configs: object) -> None:
    given = {key.replace("_", "."): value for key, value in configs.items()}
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("orders", 1, {"delay.enabled": True, **given})])


def send_far(appliance: Addressed, count: int = FAR_COUNT) -> list[str]:
    """Records that are due in an hour, in bucket files. Returns their delay ids."""
    with Producer(appliance.address) as producer:
        sent = [
            producer.send("orders", b"far %d " % number + bytes(FAR_BYTES), deliver_after=HOUR)
            for number in range(count)
        ]
        ids = [str(each.result(HANG_LIMIT_S).delay_id) for each in sent]
    directory = pathlib.Path(appliance.data_dir) / "orders@delay-0"
    if count >= FAR_COUNT:
        wait_until(lambda: bool(bucket_files(directory)), "rows are in bucket files")
    return ids


def bucket_files(delay_log: pathlib.Path) -> list[str]:
    """The bucket files that `pending.json` names."""
    try:
        manifest = Manifest.decode((delay_log / PENDING_FILE).read_bytes())
    except FileNotFoundError:
        return []
    return [each.file_name for each in manifest.files]


def send_due(appliance: Addressed, values: range, after_ms: int = 1) -> None:
    """Records that are due in some milliseconds."""
    with Producer(appliance.address) as producer:
        for number in values:
            delay = dt.timedelta(milliseconds=number % after_ms)
            producer.send("orders", b"%d" % number, deliver_after=delay)
        producer.flush(HANG_LIMIT_S)


def delivered(appliance: Addressed) -> Counter[str]:
    """The records of the topic up to its end, the beginning of each, with how often it is there."""
    key = TopicPartition("orders", 0)
    found: Counter[str] = Counter()
    with (
        suppress(UnknownTopicError),
        Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
    ):
        end = consumer.end_offsets([key])[key]
        consumer.assign([key])
        while consumer.position(key) < end:
            found.update(r.value[:12].decode().strip("\0") for r in consumer.poll(timeout_ms=1_000))
    return found


def await_delivered(appliance: Addressed, expected: set[str]) -> None:
    """Wait until these records are delivered, then see that each was delivered once."""
    wait_until(lambda: set(delivered(appliance)) >= expected, "all is delivered")
    assert delivered(appliance) == Counter(expected)


def pending(appliance: Addressed) -> set[str]:
    with Admin(appliance.address) as admin:
        return {each.delay_id for each in admin.list_delays("orders")}


def check_one_place(
    appliance: Addressed, tmp_path: pathlib.Path, count: int, far: set[str]
) -> None:
    """Topic and delay log are in one directory, with all records, and move (again)."""
    await_delivered(appliance, {str(number) for number in range(count)})
    assert pending(appliance) == far
    send_due(appliance, range(count, count + 20), after_ms=50)
    await_delivered(appliance, {str(number) for number in range(count + 20)})
    if where(appliance) == "data":
        move(appliance, tmp_path / "second")
    await_only(tmp_path, "second")
    with Admin(appliance.address) as admin:
        assert set(admin.cancel_delays(sorted(far)).values()) == {None}
    assert pending(appliance) == set()
    send_due(appliance, range(count + 20, count + 40), after_ms=50)
    await_delivered(appliance, {str(number) for number in range(count + 40)})


def await_only(tmp_path: pathlib.Path, name: str) -> None:
    """Wait until topic and delay log are in this directory alone, and no copy is left."""
    names = ["orders-0", "orders@delay-0"]
    [other] = {"data", "second"} - {name}
    wait_until(
        lambda: not any((tmp_path / other / each).exists() for each in names), "they have left"
    )
    assert all((tmp_path / name / each).is_dir() for each in names)
    for place in ("data", "second"):
        assert not list((tmp_path / place).glob("bin/*"))
        assert not list((tmp_path / place).glob("moving/*"))


class Canceller(threading.Thread):
    """Cancels records one after the other, until it is ended."""

    def __init__(self, appliance: Addressed, ids: list[str]) -> None:
        super().__init__()
        self._appliance = appliance
        self._ids = ids
        self._ended = threading.Event()
        self.cancelled: set[str] = set()
        self.failures: list[object] = []

    def run(self) -> None:
        with Admin(self._appliance.address) as admin:
            for each in self._ids:
                if self._ended.is_set():
                    return
                try:
                    outcome = admin.cancel_delays([each])[each]
                except TailraceError as error:
                    outcome = error
                if outcome is None:
                    self.cancelled.add(each)
                else:
                    self.failures.append(outcome)

    def end(self) -> None:
        self._ended.set()
        self.join()
