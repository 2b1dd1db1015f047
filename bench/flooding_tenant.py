"""A tenant who sends as much as it may: `python -m bench.flooding_tenant ADDRESS TOPIC CONNECTIONS
SECONDS`. Each of its connections has batches of 64 KiB ready at any time, and asks for metadata
between them. It prints the bytes that were acknowledged, and the times that it was made to wait.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from tailrace import Admin, Producer
from tailrace.core.errors import TailraceError

BATCH_BYTES = 64 << 10


def flood(address: str, topic: str, until: float, found: list[tuple[int, int]]) -> None:
    """Send until then. Adds (bytes acknowledged, waits)."""
    value, count = os.urandom(BATCH_BYTES), 0
    with Producer(
        address, batch_size=BATCH_BYTES, buffer_memory=8 << 20, linger_ms=0, max_block_ms=1_000,
        max_request_size=1 << 20,
    ) as producer, Admin(address) as admin:  # fmt: skip

        def on_delivery(_metadata: object, error: object) -> None:
            nonlocal count
            count += error is None

        while time.monotonic() < until:
            try:
                for _ in range(16):
                    producer.send(topic, value, on_delivery=on_delivery)
                admin.list_topics()
            except TailraceError:  # its buffer stays full for as long as it has to wait
                continue
        waits = int(producer.metrics()["throttled"])
        producer.close(0)
    found.append((count * BATCH_BYTES, waits))


def main() -> None:
    address, topic, connections, seconds = sys.argv[1:]
    found: list[tuple[int, int]] = []
    until = time.monotonic() + float(seconds)
    threads = [
        threading.Thread(target=flood, args=(address, topic, until, found))
        for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(sent for sent, _ in found), sum(waits for _, waits in found))


if __name__ == "__main__":
    main()
