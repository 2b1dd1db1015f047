"""Random kills of the appliance under transactional programs. `make torture-transactions SECONDS=60
SEED=1`.

Writers move numbers: each transaction writes one number to several partitions of two topics, and
commits or aborts at random. Transformers read the first topic and write what they read to a third
one, with their offsets in the transaction. Sometimes a writer is abandoned in a transaction, and
another takes its id over. A job writes in branches, by processes that are killed
(`tests.crash.branch_load`).

Checked, against what the programs were told:

- a committed transaction is read whole, once, in the order of its writer in each partition;
- nothing of an aborted one is read, and nothing half;
- one whose outcome nobody was told is read whole or not at all;
- each number of a committed transaction is transformed exactly once;
- of each task of a committed job one attempt is read, and none of an aborted job;
- a reader that passed an offset while all this went on saw what a reader sees in the end.

The idea of writing what makes every anomaly visible is Elle's (K. Kingsbury, P. Alvaro, 2020).
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import TailraceError, TransactionAbortedError
from tests.crash.branch_load import BranchLoad
from tests.crash.disturbance import Harm
from tests.crash.torture_base import Enough, TortureBase, run_from_command_line, run_torture
from tests.kit.processes import HANG_LIMIT_S

FIRST, SECOND, OUTPUT, ROWS = "first", "second", "output", "rows"
PARTITIONS = 3
WRITERS = 3
TRANSFORMERS = 2
CALM_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Counts:
    harm: Harm = field(default_factory=Harm)
    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    taken_over: int = 0
    transformed: int = 0
    rejected: int = 0
    """Transactions of transformers that had to be aborted and repeated."""
    jobs: int = 0
    """Committed transactions with branches."""
    writers_killed: int = 0


class TransactionTorture(TortureBase[Counts]):
    """One run."""

    def __init__(self, seed: int, directory: str) -> None:
        counts = Counts()
        super().__init__(counts, counts.harm, seed + 1, directory, "tr-groups-0")
        self._seed = seed
        self._committed: set[str] = set()
        self._aborted: set[str] = set()
        self._seen: dict[TopicPartition, list[tuple[int, str]]] = {}
        """Records that a reader saw during the run."""
        self._branches = BranchLoad(self.address, ROWS, seed)

    # ---- load ------------------------------------------------------------------------------------

    def _write(self, writer: int) -> None:
        chance = random.Random(f"{self._seed} writer {writer}")
        number = 0
        producer = self._producer(f"writer-{writer}")
        try:
            while not self._stop.wait(0.005):
                token = f"{writer}-{number}"
                number += 1
                if chance.random() < 0.03:
                    producer = self._take_over(producer, writer, token)
                    continue
                self._one_transaction(producer, chance, token)
        finally:
            producer.close()

    def _take_over(self, producer: Producer, writer: int, token: str) -> Producer:
        """Leave a transaction open, and let another producer have the id."""
        producer.begin_transaction()
        for topic, partition in self._targets():
            producer.send(topic, token.encode(), partition=partition)
        successor = self._producer(f"writer-{writer}")
        successor.init_transactions(CALM_TIMEOUT_S)
        with self._lock:
            self._aborted.add(token)
            self.counts.taken_over += 1
        producer.close(timeout=0)
        return successor

    @staticmethod
    def _targets() -> list[tuple[str, int]]:
        return [(topic, p) for topic in (FIRST, SECOND) for p in range(PARTITIONS)]

    def _one_transaction(self, producer: Producer, chance: random.Random, token: str) -> None:
        is_kept = chance.random() < 0.75
        producer.begin_transaction()
        try:
            for topic, partition in self._targets():
                for part in range(chance.choice((1, 1, 3))):
                    producer.send(topic, f"{token}:{part}".encode(), partition=partition)
            if is_kept:
                producer.commit_transaction(CALM_TIMEOUT_S)
        except TransactionAbortedError:
            is_kept = False
        if not is_kept:
            producer.abort_transaction(CALM_TIMEOUT_S)
        with self._lock:
            (self._committed if is_kept else self._aborted).add(token)
            self.counts.committed += is_kept
            self.counts.aborted += not is_kept

    def _transform(self, number: int) -> None:
        producer = self._producer(f"transformer-{number}")
        consumer = Consumer(
            FIRST, bootstrap=self.address, group_id="transformers", enable_auto_commit=False,
            auto_offset_reset="earliest", max_poll_records=50,
        )  # fmt: skip
        try:
            while not self._stop.is_set():
                self._transform_once(producer, consumer)
        finally:
            consumer.close()
            producer.close()

    def _transform_once(self, producer: Producer, consumer: Consumer) -> None:
        records = consumer.poll(300)
        if not records:
            return
        producer.begin_transaction()
        try:
            for record in records:
                producer.send(OUTPUT, f"{record.partition} {record.value.decode()}".encode())
            producer.send_offsets_to_transaction(consumer.positions(), consumer.group_metadata())
            producer.commit_transaction(CALM_TIMEOUT_S)
        except TailraceError as error:
            if error.code.name in ("PRODUCER_FENCED",):
                raise
            producer.abort_transaction(CALM_TIMEOUT_S)
            with self._lock:
                self.counts.rejected += 1
            # what was read is read again, from what the group has committed
            for partition in consumer.assignment():
                committed = consumer.committed(partition)
                if committed is None:
                    consumer.seek_to_beginning(partition)
                else:
                    consumer.seek(partition, committed)
        else:
            with self._lock:
                self.counts.transformed += len(records)

    def _run_jobs(self) -> None:
        with self._producer("job") as producer:
            self._branches.run(producer, self._stop.is_set, CALM_TIMEOUT_S)

    def _count_jobs(self) -> None:
        self.counts.jobs = self._branches.committed_count
        self.counts.writers_killed = self._branches.killed_count

    def _read(self) -> None:
        with Consumer(bootstrap=self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(topic, p) for topic, p in self._targets()])
            while not self._stop.is_set():
                for record in consumer.poll(200):
                    place = TopicPartition(record.topic, record.partition)
                    self._seen.setdefault(place, []).append((record.offset, record.value.decode()))

    def _producer(self, transactional_id: str) -> Producer:
        return Producer(
            self.address, transactional_id=transactional_id, transaction_timeout_ms=600_000,
            delivery_timeout_ms=600_000, max_block_ms=600_000, linger_ms=1,
        )  # fmt: skip

    # ---- the run and its checks ------------------------------------------------------------------

    def run(self, enough: Enough[Counts]) -> Counts:
        with Admin(self.address) as admin:
            admin.create_topics(
                [
                    NewTopic(name, partitions=PARTITIONS, config={"segment.bytes": 65_536})
                    for name in (FIRST, SECOND, OUTPUT, ROWS)
                ]
            )
        threads = [self.thread(self._write, n) for n in range(WRITERS)]
        threads += [self.thread(self._transform, n) for n in range(TRANSFORMERS)]
        threads += [self.thread(self._read), self.thread(self._run_jobs)]
        threads += [self.thread(self.alter_settings, [FIRST, SECOND, OUTPUT, ROWS])]

        def is_enough(counts: Counts) -> bool:
            self._count_jobs()
            return enough(counts)

        self.disturb(is_enough, threads)
        self._count_jobs()
        self._finish_transforming()
        self._check_writes()
        self._check_transformed()
        rows = [text for records in self._read_all(ROWS).values() for _, text in records]
        self._branches.check(Counter(rows))
        return self.counts

    def _settle(self) -> None:
        """Wait until what was committed is shown: that is when an init is answered."""
        names = [f"writer-{n}" for n in range(WRITERS)]
        names += [*(f"transformer-{n}" for n in range(TRANSFORMERS)), "job"]
        for name in names:
            with self._producer(name) as producer:
                producer.init_transactions(CALM_TIMEOUT_S)

    def _finish_transforming(self) -> None:
        """Transform the rest, undisturbed."""
        self._settle()
        with (
            self._producer("transformer-last") as producer,
            Consumer(
                FIRST, bootstrap=self.address, group_id="transformers", enable_auto_commit=False,
                auto_offset_reset="earliest",
            ) as consumer,
        ):  # fmt: skip
            places = [TopicPartition(FIRST, p) for p in range(PARTITIONS)]
            ends = consumer.end_offsets(places)
            while any((consumer.committed(place) or 0) < ends[place] for place in places):
                self._transform_once(producer, consumer)
                if sorted(consumer.assignment()) == places:
                    positions = consumer.positions()
                    if all(positions[place] >= ends[place] for place in places):
                        consumer.commit()
            producer.init_transactions(CALM_TIMEOUT_S)

    def _read_all(self, topic: str) -> dict[TopicPartition, list[tuple[int, str]]]:
        places = [TopicPartition(topic, p) for p in range(PARTITIONS)]
        found: dict[TopicPartition, list[tuple[int, str]]] = {place: [] for place in places}
        with Consumer(bootstrap=self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign(places)
            ends = consumer.end_offsets(places)
            while any(consumer.position(place) < ends[place] for place in places):
                for record in consumer.poll(int(HANG_LIMIT_S * 1000)):
                    place = TopicPartition(record.topic, record.partition)
                    found[place].append((record.offset, record.value.decode()))
        return found

    def _check_writes(self) -> None:
        found = self._read_all(FIRST) | self._read_all(SECOND)
        by_place: dict[TopicPartition, set[str]] = {}
        for place, records in found.items():
            texts = [text for _, text in records]
            twice = [text for text, count in Counter(texts).items() if count > 1]
            assert not twice, f"{place}: read twice: {twice[:5]}"
            tokens = [text.partition(":")[0] for text in texts]
            for writer in range(WRITERS):
                numbers = [int(t.split("-")[1]) for t in tokens if t.startswith(f"{writer}-")]
                assert numbers == sorted(numbers), f"{place}: order of writer {writer}"
            by_place[place] = set(tokens)
            shown = by_place[place] & self._aborted
            assert not shown, f"{place}: aborted, and read: {sorted(shown)[:5]}"
            missing = self._committed - by_place[place]
            assert not missing, f"{place}: committed, and not read: {sorted(missing)[:5]}"
            seen = self._seen.get(place, [])
            assert seen == records[: len(seen)], f"{place}: a reader saw something else before"
        seen_anywhere = {token for tokens in by_place.values() for token in tokens}
        half = {
            token
            for token in seen_anywhere
            if any(token not in tokens for tokens in by_place.values())
        }
        assert not half, f"half visible: {sorted(half)[:5]}"
        self.counts.unknown = len(seen_anywhere - self._committed)

    def _check_transformed(self) -> None:
        expected = Counter(
            f"{place.partition} {text}"
            for place, records in self._read_all(FIRST).items()
            for _, text in records
        )
        found = Counter(text for records in self._read_all(OUTPUT).values() for _, text in records)
        assert found == expected, (
            f"missing: {list((expected - found).elements())[:5]}, too often: "
            f"{list((found - expected).elements())[:5]}"
        )


def torture(seed: int, enough: Enough[Counts]) -> Counts:
    """Run until `enough`. Raises AssertionError when a promise is broken."""
    return run_torture(lambda directory: TransactionTorture(seed, directory), enough)


if __name__ == "__main__":
    sys.exit(run_from_command_line(torture))
