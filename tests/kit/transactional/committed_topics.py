"""Topics with committed, aborted and plain records, and what a reader of committed records sees."""

from __future__ import annotations

from tailrace import Admin, NewTopic, Producer

ROUNDS = 6
"""Transactions of three records each, every second one aborted, with a plain record in each."""


def fill(address: str, topic: str) -> list[bytes]:
    """Make a topic of one partition with ROUNDS transactions between other records. The result is
    what a reader of committed records is to see, in order.
    """
    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic, partitions=1)])
    committed: list[bytes] = []
    with Producer(address) as plain, Producer(address, transactional_id=topic) as producer:
        producer.init_transactions()
        for number in range(ROUNDS):
            values = [b"%d-%d" % (number, n) for n in range(3)]
            producer.begin_transaction()
            for value in values:
                producer.send(topic, value)
            producer.flush()
            other = b"plain-%d" % number
            plain.send(topic, other).result()
            if number % 2:
                producer.abort_transaction()
                committed.append(other)
            else:
                producer.commit_transaction()
                committed += [*values, other]
    return committed
