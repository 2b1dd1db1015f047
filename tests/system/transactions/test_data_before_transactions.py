"""A data directory of the last build without transactions: it opens, is read as before, and takes
transactions.
"""

from __future__ import annotations

import pathlib
import tarfile

from tailrace import Admin, Consumer, Producer
from tailrace.embedded_appliance import start_embedded
from tests.kit.processes import HANG_LIMIT_S

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "data_before_transactions.tar.gz"
"""Topic `orders`: 0 to 19 in two partitions. Topic `reminders`: two records due in 2045."""


def test_a_directory_from_before_transactions_is_read_as_before_and_takes_transactions(
    tmp_path: pathlib.Path,
) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    settings = {"journal_bytes": 1 << 20, "ring_bytes": 4 << 20}
    for is_second in (False, True):
        running = start_embedded(data_dir=str(tmp_path), settings=settings)
        try:
            with Admin(running.address) as admin:
                waiting = [delay.delay_id for delay in admin.list_delays("reminders")]
                assert len(waiting) == 2 - is_second
                if not is_second:
                    with Producer(running.address, transactional_id="upgraded") as producer:
                        producer.begin_transaction()
                        producer.send("orders", b"20", partition=0)
                        assert producer.cancel_delays(waiting) == dict.fromkeys(waiting)
                        producer.abort_transaction()
                        producer.begin_transaction()
                        producer.send("orders", b"21", partition=1)
                        assert producer.cancel_delays(waiting[0]) == {waiting[0]: None}
                        producer.commit_transaction()
                    assert [delay.delay_id for delay in admin.list_delays("reminders")] == [
                        waiting[1]
                    ]
            with Consumer(
                "orders", bootstrap=running.address, auto_offset_reset="earliest"
            ) as consumer:
                found = [int(each.value) for each in consumer.consume(21, timeout=HANG_LIMIT_S)]
            assert sorted(found) == [*range(20), 21]
        finally:
            assert running.stop() == 0
