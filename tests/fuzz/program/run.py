"""One run of a fuzzed program against a real appliance: its operations, one after the other, and
what must hold at its end.

At the end everything is read back: the logs by a consumer without a group, each group's rest from
its committed offset, each queue by one more member, and the dead letters.

Owner: `tests.fuzz.program.program_fuzzer`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import time
from functools import partial
from typing import Any

from appliance.observe.console.redrive import redrive
from tailrace import Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.core.errors import (
    TailraceError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.fuzz.program.clients import Client, ProducerClient
from tests.fuzz.program.consumers import ConsumerClient
from tests.fuzz.program.ledger import LedgerRun
from tests.fuzz.program.model import Committed, Finding, Key, expect
from tests.fuzz.program.operations import PARTITIONS, Operation, Program
from tests.fuzz.program.queues import QueueClient
from tests.fuzz.program.transactions import TransactionClient
from tests.fuzz.program.victim import Victim
from tests.fuzz.program.world import Sent
from tests.kit.hosts.wall_clock import WallClock
from tests.kit.processes import children, wait_until

CLIENTS: dict[str, Any] = {
    "p": ProducerClient, "c": ConsumerClient, "q": QueueClient, "t": TransactionClient,
}  # fmt: skip
GROUPS = ("g", "h")
LOCK_MS = 600_000
"""Longer than a run: a lock ends by a word, or with its holder."""
READ_S = 60.0
DRAINED_MS = 300
LAST = "q-last"
"""The slot of the share consumer that reads what is left."""
_numbers = itertools.count()


class ProgramRun(LedgerRun):
    """See the module's docstring."""

    def __init__(self, appliance: EmbeddedAppliance, clock: WallClock | None = None) -> None:
        super().__init__(appliance.address)
        self._appliance = appliance
        self._clock = clock
        self._open: dict[str, Client] = {}
        self._closed: list[Client] = []
        self._redrives = False
        self._killed: set[str] = set()
        """The roles of killed processes: those of groups run on demand."""
        self.at: Operation | None = None
        """The operation under way."""

    # ---- the program -----------------------------------------------------------------------------

    def run(self, program: Program) -> None:
        """Raises Finding."""
        self.has_deletions = any(operation.name == "delete" for operation in program)
        logger = logging.getLogger("tailrace")
        logger.addHandler(self.log)
        propagates, logger.propagate = logger.propagate, False
        try:
            for operation in program:
                self.at = operation
                self._step(operation)
            self.at = None
            self._finish()
        finally:
            for client in list(self._open.values()):
                with contextlib.suppress(Exception, AssertionError):
                    client.step(Operation(client.slot, "close", ("close",)))
            self._remove_topics()
            self._admin.close()
            self.calls.close()
            logger.removeHandler(self.log)
            logger.propagate = propagates

    def _step(self, operation: Operation) -> None:
        slot, arguments = operation.slot, operation.arguments
        if slot == "world":
            getattr(self, f"_{operation.name}")(*arguments)
        elif operation.name == "open":
            if slot not in self._open:
                self._open[slot] = CLIENTS[slot[0]](self, slot, *arguments)
        elif slot in self._open:
            client = self._open[slot]
            client.step(operation)
            if not client.is_open:
                self._closed.append(self._open.pop(slot))

    # ---- the world -------------------------------------------------------------------------------

    def _create(self, name: str, limit: int) -> None:
        if name in self.topics.live:
            return
        configs = {
            "group.share.record.lock.duration.ms": LOCK_MS,
            "group.share.delivery.count.limit": self.queue.limit,
        }
        if not self.topics.creations:
            self.queue.limit = limit
            configs["group.share.delivery.count.limit"] = limit
        topic = NewTopic(self.name(name), PARTITIONS[name], configs)
        with contextlib.suppress(*(() if not self.kill_count else (TailraceError,))):
            self._try(lambda: self._admin.create_topics(topic))
        info = self._try(lambda: self._admin.topic_info([topic.name]))[topic.name]
        self.topics.created(name, info.topic_id)

    def _delete(self, name: str) -> None:
        if name in self.topics.live:
            self.delete_count += 1
            self.topics.live.discard(name)
            with contextlib.suppress(*(() if not self.kill_count else (UnknownTopicError,))):
                self._try(lambda: self._admin.delete_topics([self.name(name)]))

    def _kill(self, role: str) -> None:
        for name, pid in children(self._appliance).items():
            if name.startswith(f"tr-{role}"[:15]):
                self.kill_count += 1
                self._killed.add(role)
                self.queue.lost_sight()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _settle(self) -> None:
        """Wait until all processes are back and answer."""
        roles = {"worker", "front", "flusher", "controller", *self._killed}

        def is_whole() -> bool:
            names = " ".join(children(self._appliance))
            return all(f"tr-{role}"[:15] in names for role in roles)

        wait_until(is_whole, "the killed processes are back")
        self._try(self._admin.list_topics)

    def _jump(self, seconds: int) -> None:
        if self._clock is not None:
            self._clock.jump(seconds)

    def _victim(self, kind: str, group: str, name: str, count: int, commits: bool) -> None:
        if name in self.topics.live:
            Victim(self, kind, "s" if kind == "ShareConsumer" else group, name).live(count, commits)

    def _redrive(self) -> None:
        self._redrives = True

    def _check_offsets(self, group: str) -> None:
        """Check a group's committed offsets, asked by an administrator."""
        keys = [(name, number) for name in self.topics.live for number in range(PARTITIONS[name])]
        partitions = [TopicPartition(self.name(name), number) for name, number in keys]
        if not keys:
            return
        found = self._try(lambda: self._admin.list_group_offsets(self.name(group), partitions))
        for key, partition in zip(keys, partitions, strict=True):
            committed = self._committed(group, key)
            offset = int(found[partition] or 0)
            expect(
                offset in committed.now(),
                f"group {group} has committed {offset} of {key}, not {sorted(committed.now())}",
            )

    def _committed(self, group: str, key: Key) -> Committed:
        place = (group, self.topics.creations[key[0]][-1], key[1])
        return self.offsets.setdefault(place, Committed())

    # ---- the end ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Close everything, and read it back."""
        if self.kill_count:
            self._settle()
        for slot in sorted(self._open):
            self._step(Operation(slot, "close", ("close",)))
        with Consumer(
            bootstrap=self.address, auto_offset_reset="earliest", fetch_max_wait_ms=50
        ) as reader:
            ends = {
                (name, number): self._check_log(reader, (name, number))
                for name in sorted(self.topics.live)
                for number in range(PARTITIONS[name])
            }
        self._check_sent(ends)
        for group in GROUPS:
            self._check_offsets(group)
            self._check_rest(group, ends)
        self._check_queue(ends)
        self._check_transactions()

    def _read(self, reader: Consumer, key: Key) -> list[bytes]:
        """The values of a partition from the consumer's position on."""
        partition = TopicPartition(self.name(key[0]), key[1])
        end = reader.end_offsets([partition])[partition]
        found: list[bytes] = []
        deadline = time.monotonic() + READ_S
        while reader.position(partition) < end:
            expect(time.monotonic() < deadline, f"{key} cannot be read up to {end}")
            for record in reader.poll(200):
                self.see(key, record.topic_id, record.offset, record.value, "the last reader")
                found.append(record.value)
        return found

    def _check_log(self, reader: Consumer, key: Key) -> int:
        """Each record once, in the order in which its producer sent it. Returns the end."""
        partition = TopicPartition(self.name(key[0]), key[1])
        reader.assign([partition])
        least = max((sent.place[1] + 1 for sent in self.acknowledged(key) if sent.place), default=0)
        wait_until(
            lambda: reader.end_offsets([partition])[partition] >= least,
            f"the end of {key} is {least}",
        )
        values = self._read(reader, key)
        expect(len(set(values)) == len(values), f"{key} has a record twice")
        last: dict[str, Sent] = {}
        for value in values:
            sent = self.sent[value]
            expect(not sent.is_withdrawn, f"{value!r:.60} was sent by a cancelled `send`")
            expect(sent.topic == key[0], f"{value!r:.60} was sent to {sent.topic}, and is in {key}")
            before = last.get(sent.producer)
            expect(
                before is None or before.number < sent.number,
                f"{key}: {value!r:.60} stands behind {before and before.value!r:.60}",
            )
            last[sent.producer] = sent
        return len(values)

    def _check_sent(self, ends: dict[Key, int]) -> None:
        """Check that acknowledged records are where their producer was told; a key has one
        partition.
        """
        key_partitions: dict[tuple[str, str], set[int]] = {}
        for sent in self.sent.values():
            ids = self.topics.creations[sent.topic]
            if sent.place is None or sent.topic not in self.topics.live:
                continue
            partition, offset = sent.place
            if sent.creation == len(ids):
                expect(
                    offset < ends[sent.topic, partition],
                    f"{sent.value!r:.60} was acknowledged at {offset} of {partition}, and is lost",
                )
                where = f"{sent.value!r:.60}"
                self.topics.see((ids[-1], partition, offset), sent.value, where)
                if sent.key is not None and sent.partition is None:
                    key_partitions.setdefault((sent.topic, sent.key), set()).add(partition)
        for key, partitions in key_partitions.items():
            expect(len(partitions) == 1, f"key {key} went to {partitions}")

    def _check_rest(self, group: str, ends: dict[Key, int]) -> None:
        """The next reader of the group goes on where the group has committed."""
        with Consumer(
            bootstrap=self.address,
            group_id=self.name(group),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        ) as reader:
            for key, end in ends.items():
                partition = TopicPartition(self.name(key[0]), key[1])
                reader.assign([partition])
                position = reader.position(partition)
                allowed = self._committed(group, key).now()
                expect(
                    position in allowed,
                    f"group {group} begins {key} at {position}, not at {sorted(allowed)}",
                )
                rest = self._read(reader, key)
                expect(len(rest) >= end - position, f"group {group} reads {len(rest)} of {key}")

    def _check_queue(self, ends: dict[Key, int]) -> None:
        """Check that a record that is not accepted comes again, with its count, or is a dead
        letter.
        """
        if not any(isinstance(client, QueueClient) for client in self._closed) and not any(
            self.queue.jobs
        ):
            return
        places = {
            (self.topics.creations[name][-1], number, offset): name
            for (name, number), end in ends.items()
            for offset in range(end)
        }
        jobs = {place: self.queue.job(place) for place in places}
        limit = self.queue.limit
        letters = {
            place
            for place, job in jobs.items()
            if job.is_rejected or (job.least >= limit and not job.may_be_done and not job.is_done)
        }
        requested = {
            place
            for place, job in jobs.items()
            if not job.is_done and not job.may_be_done and place not in letters and job.most < limit
        }
        names = sorted({self.name(name) for name in places.values()})
        if names:
            self._drain(names, requested, letters, ends)

    def _drain(
        self, names: list[str], requested: set[Any], letters: set[Any], ends: dict[Key, int]
    ) -> None:
        subscribed = tuple(self.short[name] for name in names)
        settings = {"share_acknowledgement_mode": "explicit"}
        run = QueueClient(self, LAST, "ShareConsumer", "s", subscribed, settings, False)
        consumer: ShareConsumer = run.client
        deadline = time.monotonic() + READ_S
        is_idle = False
        while requested or not is_idle:
            records = consumer.poll(DRAINED_MS)
            # A queue's reader writes the dead letters.
            is_idle = not records and (not letters or self._letters(names)[0].keys() >= letters)
            run._take(records, in_loop=False)
            for record in records:
                consumer.acknowledge(record)
                run.model.acknowledges(run._place(record), "accept")
                requested.discard(run._place(record))
            expect(
                time.monotonic() < deadline,
                f"the queue does not deliver {sorted(requested)[:5]} of {len(requested)}, or "
                f"has not all {len(letters)} dead letters",
            )
        consumer.commit()
        run.close(Operation(LAST, "close"))
        found, values = self._letters(names)
        places = {
            (self.topics.creations[name][-1], number, offset)
            for (name, number), end in ends.items()
            for offset in range(end)
        }
        missing = letters - found.keys()
        expect(not missing, f"no dead letters: {sorted(missing)[:5]} of {len(missing)}")
        for place, count in found.items():
            job = self.queue.job(place)
            if place in places:
                may_be = job.is_rejected or job.may_be_done or job.most >= self.queue.limit
                expect(may_be, f"{place} is a dead letter, and was neither rejected nor given up")
                expect(
                    count == 1 or job.may_be_done,
                    f"{place} is a dead letter {count} times",
                )
        for name in values if self._redrives else ():
            self._check_redrive(name, values[name], ends)

    def _check_redrive(self, name: str, values: list[bytes], ends: dict[Key, int]) -> None:
        """The dead letters of a topic are sent again, each once."""
        letters = f"{self.name(name)}.dlq"
        for expected in (len(values), 0):
            again = self._try(partial(redrive, self.address, letters))
            if not self.kill_count:
                expect(again == (expected, 0), f"{again} of {expected} letters were sent again")
        # A commit returns when it is decided; the successor of the id waits for its markers, which
        # move the end that a reader of committed records sees.
        with Producer(self.address, transactional_id=f"redrive.{letters}") as successor:
            self._try(successor.init_transactions)
        sent: list[bytes] = []
        with Consumer(bootstrap=self.address, fetch_max_wait_ms=50) as reader:
            for number in range(PARTITIONS[name]):
                partition = TopicPartition(self.name(name), number)
                reader.assign([partition])
                reader.seek(partition, ends[name, number])
                sent += self._read(reader, (name, number))
        expect(sorted(sent) == sorted(values), f"of {sorted(values)} {sorted(sent)} were sent")

    def _letters(self, names: list[str]) -> tuple[dict[Any, int], dict[str, list[bytes]]]:
        """Place of a record -> how many dead letters there are of it, and all values of each
        topic.
        """
        found: dict[Any, int] = {}
        values: dict[str, list[bytes]] = {}
        existing = set(self._try(self._admin.list_topics))
        with Consumer(bootstrap=self.address, auto_offset_reset="earliest") as reader:
            for name in names:
                if f"{name}.dlq" not in existing:
                    continue
                keys = [
                    TopicPartition(f"{name}.dlq", n) for n in reader.partitions_for(f"{name}.dlq")
                ]
                reader.assign(keys)
                ends = reader.end_offsets(keys)
                while any(reader.position(key) < end for key, end in ends.items()):
                    for record in reader.poll(200):
                        headers = dict(record.headers)
                        place = (
                            bytes.fromhex(headers["dlq.topic_id"].decode()),
                            int(headers["dlq.partition"]),
                            int(headers["dlq.offset"]),
                        )
                        found[place] = found.get(place, 0) + 1
                        values.setdefault(self.short[name], []).append(record.value)
        return found, values

    def _remove_topics(self) -> None:
        """Other runs need the room."""
        with contextlib.suppress(TailraceError):
            existing = self._admin.list_topics()
            mine = [name for name in existing if name.startswith(self.prefix)]
            if mine:
                self._admin.delete_topics(mine)


def run(program: Program, appliance: EmbeddedAppliance, clock: WallClock | None = None) -> None:
    """Run a program. Raises Finding, which says at which operation."""
    one = ProgramRun(appliance, clock)
    try:
        one.run(program)
    except Finding as finding:
        at = f"at {one.at}" if one.at is not None else "at the end"
        raise Finding(f"{finding} ({at})") from finding
    except Exception as error:
        at = f"at {one.at}" if one.at is not None else "at the end"
        raise Finding(f"{type(error).__name__}: {error} ({at})") from error
