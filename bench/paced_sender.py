"""The producer of `bench.measure.end_to_end`, a process of its own.

`python -P -m bench.paced_sender ADDRESS TOPIC RATE COUNT SIZE` sends COUNT records of SIZE bytes,
RATE a second. Each begins with the moment at which it was due.
"""

from __future__ import annotations

import sys

from bench.measure import paced
from tailrace import Producer
from tailrace.kernel.reference_arrow import default_rows


def main() -> None:
    """See the module's docstring."""
    address, topic = sys.argv[1:3]
    rate, count, size = map(int, sys.argv[3:6])
    default_rows([0], [None], [b""], None)  # Arrow's first use takes milliseconds
    with Producer(address, acks="all", linger_ms=1) as producer:
        producer.partitions_for(topic)
        filler = b"x" * (size - 8)
        for due in paced(rate, count):
            producer.send(topic, due.to_bytes(8, "big") + filler)


if __name__ == "__main__":
    main()
