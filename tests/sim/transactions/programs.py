"""Transactional programs of a schedule: writers and transformers, past the SDK.

They keep to docs/protocol.md and are otherwise careless: they die in a transaction, a second owner
takes the id while the first goes on, requests are repeated, and copies of them arrive late over
another connection.

    init -> idle -> (creating ->) open -> (preparing ->) ending -> idle
                        \\ a batch was fenced: asking -> idle, or gone

Transformers read a partition that is assigned by hand, or are members of a group, whose commit may
come when the partition has gone to another program. Some transactions of writers have tasks, in
branches: each is attempted until it is done. Some are prepared first: then whoever has the id next
decides them.

Owner: one `tests.sim.transactions.schedule.TransactionSchedule`.
Invariants: END_TRANSACTION comes behind the acknowledgement of every batch; epochs and sequences
    are those of the responses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tailrace.batch import arrow_codec
from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.consumer.consumer import Consumer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.record_batch.header_stamps import stamp_producer
from tailrace.format.segments.segment import (
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol import credit_messages, produce_messages
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tests.kit.batches import TIME_US
from tests.kit.log_files.simdisk import SimFiles
from tests.kit.transactional.transaction_checker import Token, TransactionHistory, value_of
from tests.sim.actors import Inbox
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND
from tests.sim.machine.world import World
from tests.sim.transactions.members import LOST, Membership
from workers.segment.files import read_whole

RETRY_NS = 20 * MS
REPEATED = frozenset({
    ErrorCode.TIMED_OUT, ErrorCode.NOT_READY, ErrorCode.NOT_REACHABLE, ErrorCode.SHUTTING_DOWN,
    ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.DISK_FULL,
    ErrorCode.OUT_OF_ORDER_SEQUENCE, ErrorCode.PARTITION_OFFLINE, ErrorCode.STORAGE_ERROR,
})  # fmt: skip
INPUTS_MAX = 4
COPIED = frozenset({
    Api.PRODUCE, Api.END_TRANSACTION, Api.INIT_TRANSACTIONS, Api.CREATE_BRANCHES,
    Api.JOIN_TRANSACTION,
})  # fmt: skip
"""Requests of which copies arrive late."""


@dataclass(slots=True)
class Piece:
    """A batch that is not acknowledged."""

    place: TopicPartition
    values: list[bytes]
    data: bytes


class Copy(NamedTuple):
    """A request that arrives late, another time."""

    due_ns: int
    api: Api
    body: Sequence[bytes]
    size: int


@dataclass(slots=True, frozen=True)
class Common:
    """State that all programs of a schedule share."""

    world: World
    rng: random.Random
    history: TransactionHistory
    topics: dict[str, TopicInfo]
    key_of: Callable[[bytes], bytes | None] = lambda _: None
    """The key of a value."""
    keeps_markers: bool = True
    """False: the topics are compacted."""


class Content(NamedTuple):
    """Content of a decision: transaction, branches, the committed offset of a transformer."""

    token: Token
    named: tuple[tuple[Token, tuple[int, int]], ...]
    offset: int


class Instance:
    """One life of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.connection = Connection(ADDRESS, program.name, program.common.world.runtime)
        self.state = "init"
        self.attempt = f"{program.common.rng.getrandbits(64):x}"
        self.owner = self.producer_id = self.epoch = 0
        self.number = 0
        self.part = 0
        self.outcome = ""
        self.offset = -1
        """The next input, for a transformer; -1: to be asked for."""
        self.source: list[tuple[int, bytes]] = []
        self.tasks: list[list[BranchAttempt]] = []
        """The attempts of each task of the transaction."""
        self.member = program.join(self)
        self.identity: dict[str, Any] = {"member_id": None, "member_epoch": -1}
        """The member that has the partition from which `offset` is read on."""
        self.content = Content(self.token, (), -1)
        """Content of the decision that is asked for, or of the one that was prepared."""
        self.is_prepared = False
        self.sequences: dict[TopicPartition, int] = {}
        self.unknown: list[Piece] = []
        self.is_waiting = False
        self.retry_at_ns = 0
        self.inbox = Inbox()

    @property
    def token(self) -> Token:
        return Token(self.program.name, self.owner, self.number)

    # ---- turns -----------------------------------------------------------------------------------

    def pump(self) -> None:
        for attempt in self.attempts if self.tasks else ():
            attempt.pump()
        if self.member is not None and self.state != "gone":
            self.member.pump()
        if not self._is_ready():
            return
        if self.state == "init":
            self._ask(Api.INIT_TRANSACTIONS, self._init_request(), self._on_init)
        elif self.state == "idle":
            self._begin()
        elif self.state == "asking":
            body = {"transactional_id": self.program.name, "owner": self.owner}
            self._ask(Api.DESCRIBE_TRANSACTION, body, self._on_described)
        elif self.state == "creating":
            count = len(self.tasks)
            body = {**self._transaction(), "count": count}
            self._ask(Api.CREATE_BRANCHES, body, self._on_created)
        elif self.state == "open":
            self._go_on()
        else:
            self._ask(Api.END_TRANSACTION, self._end_request(), self._on_end)

    def _is_ready(self) -> bool:
        """True if there is something to do."""
        now_ns = self.connection.now_ns()
        self.connection.process()
        self.connection.tick(now_ns)
        self.inbox.handle()
        return (
            not self.is_waiting
            and self.state != "gone"
            and now_ns >= self.retry_at_ns
            and self.connection.is_ready
        )

    @property
    def attempts(self) -> list[BranchAttempt]:
        return [attempt for attempts in self.tasks for attempt in attempts]

    def _begin(self) -> None:
        """The next transaction, if there is something to write."""
        program = self.program
        if program.source is not None and self.offset < 0:
            key = program.source
            if self.member is not None:
                if not self.member.owns(key):
                    self._wait()
                    return
                self.identity = self.member.identity
            body = {"group": program.group, "partitions": [[key.topic, key.partition]]}
            self._ask(Api.FETCH_OFFSETS, body, self._on_offsets)
            return
        if program.is_calm:
            return
        if program.source is not None:
            self.source = program.inputs(self.offset)
            if not self.source:
                self.retry_at_ns = self.connection.now_ns() + RETRY_NS
                return
        self.state = "open"
        self.part = 0
        self.sequences = {}
        program.producers[self.token] = (self.producer_id, self.epoch)
        rng = program.common.rng
        if program.source is None:
            if rng.random() < 0.4:
                self.tasks = [[] for _ in range(rng.randint(1, 3))]
                self.state = "creating"
            for _ in range(rng.randint(0 if self.tasks else 1, 6)):
                count = rng.randint(1, 2)
                self._make([b""] * count)
        else:
            for _, value in self.source:
                self._make([value])

    def _make(self, sources: list[bytes]) -> None:
        """One batch, to some partition."""
        program, common = self.program, self.program.common
        place = common.rng.choice(program.places)
        info = common.topics[place.topic]
        values = []
        for source in sources:
            values.append(value_of(self.token, self.part, source))
            self.part += 1
            common.history.send(self.token, place, values[-1])
        seed = info.seeds[place.partition]
        keys = [common.key_of(value) for value in values]
        rows = default_rows([TIME_US] * len(values), keys, list(values), None)
        data = arrow_codec.encode(
            rows, schema_id=info.schema_id, seed=seed, compression="none",
            first_timestamp_us=TIME_US, max_timestamp_us=TIME_US,
        )  # fmt: skip
        sequence = self.sequences.get(place, 0)
        with memoryview(data) as view:
            stamp_producer(
                view, producer_id=self.producer_id, producer_epoch=self.epoch,
                base_sequence=sequence, seed=seed,
            )  # fmt: skip
        self.sequences[place] = sequence + len(values)
        self.unknown.append(Piece(place, values, bytes(data)))

    def _go_on(self) -> None:
        rng = self.program.common.rng
        if rng.random() < 0.05:
            self.state, self.outcome = "ending", "abort"
            self.content = self._contents()
        elif any(attempt.state == "gone" for attempt in self.attempts):
            self.state = "asking"
        elif self.unknown:
            self._send(list(self.unknown) if rng.random() < 0.5 else self.unknown[:1])
        elif not attempt_tasks(self.program, self, self.tasks):
            self._wait()
        elif self.program.is_calm or rng.random() < 0.7:
            self.content = self._contents()
            self.program.contents[self.producer_id, self.epoch] = self.content
            self.state = "ending"
            if rng.random() < (0.2 if self.program.source is None else 0.5):
                self.outcome = "prepare"
            else:
                self._decide()
        elif self.program.source is None:
            self._make([b""])

    def _contents(self) -> Content:
        """Contents of a decision now: one finished attempt of each task."""
        rng = self.program.common.rng
        done = [[one for one in attempts if one.state == "done"] for attempts in self.tasks]
        named = [rng.choice(attempts) for attempts in done if attempts]
        offset = self.source[-1][0] + 1 if self.source else -1
        return Content(
            self.token, tuple((one.token, (one.producer_id, one.epoch)) for one in named), offset
        )

    def _decide(self) -> None:
        rng = self.program.common.rng
        self.outcome = "commit" if rng.random() < 0.8 else "abort"
        if self.outcome == "commit":
            self.program.common.history.ask_commit(
                self.content.token, *(token for token, _ in self.content.named)
            )

    # ---- requests --------------------------------------------------------------------------------

    def _transaction(self) -> dict[str, Any]:
        return {
            "transactional_id": self.program.name, "owner": self.owner,
            "producer_id": self.producer_id, "producer_epoch": self.epoch,
        }  # fmt: skip

    def _init_request(self) -> dict[str, Any]:
        return {
            "transactional_id": self.program.name, "timeout_ms": self.program.timeout_ms,
            "client_id": self.connection._owner, "attempt": self.attempt, "keep_prepared": True,
        }  # fmt: skip

    def _end_request(self) -> dict[str, Any]:
        body: dict[str, Any] = {**self._transaction(), "outcome": self.outcome}
        if self.outcome == "abort" or self.is_prepared:
            return body
        key = self.program.source
        if key is not None:
            entry = [key.topic, key.partition, self.content.offset, -1, ""]
            group = {"group": self.program.group, **self.identity, "entries": [entry]}
            body["offsets"] = [group]
        if self.content.named:
            body["branches"] = [list(branch) for _, branch in self.content.named]
        return body

    def _ask(self, api: Api, body: dict[str, Any], handler: Callable[[Response], None]) -> None:
        encoded = [requests.encode_json(body)]
        self._request(api, encoded, 0, partial(self._answered, handler))

    def _send(self, pieces: list[Piece]) -> None:
        session, topics = self.connection.session, self.program.common.topics
        size = sum(len(piece.data) for piece in pieces)
        if not session.may_send(size):
            self.connection.request(Api.CREDIT, [credit_messages.encode_credit(size)], None)
            self._wait()
            return
        entries = [
            produce_messages.ProduceEntry(
                topics[one.place.topic].topic_id, one.place.partition,
                topics[one.place.topic].slot_map_version, len(one.data),
            )
            for one in pieces
        ]  # fmt: skip
        timeout_ms = self.program.common.rng.choice((5, 100, 3_000))
        head = produce_messages.encode_produce_batches(
            produce_messages.ProduceBatches(produce_messages.ACKS_ALL, timeout_ms, entries)
        )
        body = [head, b"".join(one.data for one in pieces)]
        self._request(Api.PRODUCE, body, size, partial(self._on_produced, pieces))

    def _request(
        self, api: Api, body: Sequence[bytes], size: int,
        handler: Callable[[Response | None], None],
    ) -> None:  # fmt: skip
        rng = self.program.common.rng
        if rng.random() < 0.25 and api in COPIED:
            late_ns = rng.choice((MS, 50 * MS, 2 * SECOND)) * rng.randint(1, 5)
            self.program.copies.append(Copy(self.connection.now_ns() + late_ns, api, body, size))
        if self.connection.request(api, body, self.inbox.later(handler)):
            self.connection.session.sent_bytes += size
            self.is_waiting = True
        else:
            self._wait()

    def _wait(self) -> None:
        self.retry_at_ns = self.connection.now_ns() + RETRY_NS

    # ---- answers ---------------------------------------------------------------------------------

    def _answered(self, handler: Callable[[Response], None], response: Response | None) -> None:
        self.is_waiting = False
        if response is None or response.code in REPEATED:
            self._wait()
        elif response.code is ErrorCode.PRODUCER_FENCED:
            self._leave()
        else:
            handler(response)

    def _on_init(self, response: Response) -> None:
        assert response.code is ErrorCode.OK, (response.code, response.detail())
        answer = requests.decode_json(response.body[0])
        self.owner = answer["owner"]
        if answer["prepared"] is not None:
            self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
            self.content = self.program.contents[self.producer_id, self.epoch]
            self._check_ended(self.content.token)
            self.is_prepared, self.state = True, "ending"
            self._decide()
            return
        self._check_ended()
        self._follow(answer)

    def _check_ended(self, prepared: Token | None = None) -> None:
        """Check that the former owners' writes are ended for readers by now, without what is
        prepared.
        """
        program, common = self.program, self.program.common
        if not common.keeps_markers:
            return
        for token, written in common.history.transactions.items():
            is_own = token.program.split(".")[0] == program.name
            if not is_own or token.owner >= self.owner or token not in program.producers:
                continue
            if prepared is not None and token[1:] == prepared[1:]:
                continue
            for place in {written.values[value] for value in written.offsets}:
                ended = _ended_in(common, place)
                assert ended is None or program.producers[token] in ended, (
                    f"owner {self.owner} of {program.name} begins, and {token} is open in {place}"
                )

    def _on_described(self, response: Response) -> None:
        assert response.code is ErrorCode.OK, (response.code, response.detail())
        answer = requests.decode_json(response.body[0])
        if (answer["producer_id"], answer["producer_epoch"]) == (self.producer_id, self.epoch):
            self.state = "open"
            self._wait()
            return
        self.content = self._contents()
        self._ended("abort")
        self._follow(answer)

    def _on_created(self, response: Response) -> None:
        if response.code is ErrorCode.TRANSACTION_ABORTED:
            self.state = "asking"
            return
        assert response.code is ErrorCode.OK, (response.code, response.detail())
        self.state = "open"

    def _ended(self, outcome: str) -> None:
        """The transaction has this outcome, and each attempt of its tasks its own."""
        history = self.program.common.history
        history.end(self.content.token, outcome)
        named = {token for token, _ in self.content.named}
        for token in named:
            history.end(token, outcome)
        for attempt in self.attempts:
            if attempt.token not in named:
                history.end(attempt.token, "abort")

    def _on_offsets(self, response: Response) -> None:
        assert response.code is ErrorCode.OK, (response.code, response.detail())
        ((*_, offset, _, _, _),) = requests.decode_json(response.body[0])["offsets"]
        self.offset = max(0, offset)
        self.program.seek(self.offset)

    def _on_end(self, response: Response) -> None:
        answer = requests.decode_json(response.body[0])
        outcome = answer.get("outcome")
        if response.code in LOST and self.member is not None:
            self.program.refused_count += 1
            self.outcome = "abort"  # nothing was decided
            return
        if outcome == "prepare":
            self.is_prepared = True
            self._decide()
            return
        assert outcome in ("commit", "abort"), (
            f"{self.token}: {self.outcome} was refused: {response.code}, {answer}"
        )
        self._ended(outcome)
        self._follow(answer)

    def _on_produced(self, pieces: list[Piece], response: Response | None) -> None:
        self.is_waiting = False
        if response is None or response.code is not ErrorCode.OK:
            assert response is None or response.code in REPEATED, response.code
            self._wait()
            return
        entries = produce_messages.decode_produced_batches(response.body[0])
        for piece, entry in zip(pieces, entries, strict=True):
            code = ErrorCode(entry.error)
            if code is ErrorCode.OK:
                for number, value in enumerate(piece.values):
                    self.program.common.history.acknowledge(value, entry.base_offset + number)
                self.unknown.remove(piece)
            elif code is ErrorCode.PRODUCER_FENCED:
                self._on_fenced()
            else:
                assert code in REPEATED, f"{self.token}: {piece.place} refuses: {code.name}"
                self._wait()

    def _on_fenced(self) -> None:
        """A worker has refused a batch for good."""
        self.state = "asking"

    def _follow(self, answer: dict[str, Any]) -> None:
        """The next transaction is this one."""
        self.producer_id, self.epoch = answer["producer_id"], answer["producer_epoch"]
        self.number += 1
        self.unknown = []
        self.offset = -1
        self._let_go()
        self.is_prepared = False
        self.state = "idle"

    def _let_go(self) -> None:
        """The tasks' attempts go on without an owner."""
        self.program.zombies += self.attempts
        self.tasks = []

    def _leave(self) -> None:
        """Another has the id."""
        self._let_go()
        self.state = "gone"
        self.close()

    def close(self) -> None:
        """End its connections, as a SIGKILL does."""
        self.connection.close()
        if self.member is not None:
            self.member.close()

    def next_wake_ns(self, now_ns: int) -> int:
        if self.state == "gone":
            return now_ns + SECOND
        tick_ns = self.connection.next_tick_ns()
        wake_ns = now_ns + SECOND if tick_ns is None else tick_ns
        if self.member is not None:
            wake_ns = min(wake_ns, self.member.next_wake_ns(now_ns))
        return wake_ns if self.is_waiting else min(wake_ns, max(self.retry_at_ns, now_ns + MS))


class BranchAttempt(Instance):
    """One attempt of a task, in a branch of its owner's transaction.

    joining -> writing -> done
          \\        \\ the transaction has ended: gone
    """

    def __init__(self, program: Program, owner: Instance, task: int) -> None:
        super().__init__(program)
        self.task = task
        program.attempt_count += 1
        self.serial = program.attempt_count
        self.owner, self.number = owner.owner, owner.number
        self.transaction = owner._transaction()
        self.state = "joining"
        self.left = program.common.rng.randint(0, 4)
        """Batches that it will make."""

    @property
    def token(self) -> Token:
        name = f"{self.program.name}.{getattr(self, 'serial', 0)}"
        return Token(name, self.owner, self.number)

    def pump(self) -> None:
        if not self._is_ready() or self.state == "done":
            return
        if self.state == "joining":
            body = {**self.transaction, "attempt": self.attempt}
            self._ask(Api.JOIN_TRANSACTION, body, self._on_joined)
        elif self.unknown:
            self._send(self.unknown[:2])
        elif self.left:
            self.left -= 1
            self._make([b""])
        else:
            self.state = "done"

    def _on_joined(self, response: Response) -> None:
        if response.code in (ErrorCode.TRANSACTION_ABORTED, ErrorCode.INVALID_TRANSACTION):
            self._leave()
            return
        assert response.code is ErrorCode.OK, (response.code, response.detail())
        answer = requests.decode_json(response.body[0])
        branch = answer["producer_id"], answer["producer_epoch"]
        producers = self.program.producers
        assert self.token not in producers, (
            f"{self.token} was refused by a worker, and its transaction is open"
        )
        assert branch not in producers.values(), f"{self.token} got {branch}, as another one did"
        producers[self.token] = branch
        self.producer_id, self.epoch = branch
        self.state = "writing"

    def _on_fenced(self) -> None:
        """Its join says why."""
        self.state = "joining"

    def _let_go(self) -> None:
        """It has no tasks."""


def attempt_tasks(program: Program, owner: Instance, tasks: list[list[BranchAttempt]]) -> bool:
    """Begin attempts, some of them twice, and kill some. True: each task has one that is done."""
    rng = program.common.rng
    for number, attempts in enumerate(tasks):
        if attempts and rng.random() < 0.03:
            program.zombies.append(attempts.pop())  # its owner takes it for dead
        is_repeated = not program.is_calm and len(attempts) == 1 and rng.random() < 0.1
        if not attempts or is_repeated:
            attempts.append(BranchAttempt(program, owner, number))
    return all(any(one.state == "done" for one in attempts) for attempts in tasks)


@dataclass(slots=True)
class Program:
    """A transactional id: its owner, and those who were it."""

    name: str
    common: Common
    places: list[TopicPartition]
    timeout_ms: int
    source: TopicPartition | None = None
    """Partition that a transformer reads."""
    consumer: Consumer | None = None
    group: str = ""
    """That a transformer commits its offsets for."""
    members_rng: random.Random | None = None
    """Generator of members; None: the partition is assigned by hand."""
    refused_count: int = 0
    """Commits that were refused because the partition had gone to another member."""
    is_calm: bool = False
    copies: list[Copy] = field(default_factory=list)
    lives: list[Instance] = field(default_factory=list)
    carrier: Connection = field(init=False)
    """Connection that copies of requests arrive over."""
    received: list[tuple[int, bytes]] = field(default_factory=list)
    producers: dict[Token, tuple[int, int]] = field(default_factory=dict)
    """(producer id, epoch) of each transaction, and of each attempt that has joined one."""
    contents: dict[tuple[int, int], Content] = field(default_factory=dict)
    """(producer id, epoch) -> what its decision has."""
    zombies: list[BranchAttempt] = field(default_factory=list)
    """Attempts whose owner goes on without them."""
    attempt_count: int = 0

    def __post_init__(self) -> None:
        self.carrier = Connection(ADDRESS, f"{self.name} late", self.common.world.runtime)
        self.lives.append(Instance(self))

    def join(self, life: Instance) -> Membership | None:
        """The membership of one life."""
        if self.members_rng is None or self.source is None or isinstance(life, BranchAttempt):
            return None
        return Membership(
            self.common.world, self.members_rng, self.group, self.source.topic, self.name
        )

    def turn(self) -> None:
        if self.members_rng is not None and self.members_rng.random() < 0.04:
            life = self.members_rng.choice(self.lives)
            if life.member is not None and life.state in ("open", "ending"):
                life.member.leave()
                pause_ns = self.members_rng.choice((0, 3 * SECOND, 8 * SECOND))
                life.retry_at_ns = self.common.world.now_ns + pause_ns
        chance = self.common.rng.random()
        if self.members_rng is not None:
            chance *= 5  # it takes a member longer to come to a commit
        if chance < 0.01:
            self.die()
        elif chance < 0.02 and len(self.lives) < 3:
            self.lives.append(Instance(self))
        self.pump()

    def die(self) -> None:
        """SIGKILL of the newest; what it had sent may still arrive."""
        died = self.lives.pop()
        died._let_go()
        died.close()
        self.lives.append(Instance(self))

    def pump(self) -> None:
        for one in list(self.lives):
            one.pump()
        self.lives = [one for one in self.lives if one.state != "gone"] or [Instance(self)]
        for zombie in self.zombies:
            zombie.pump()
        over = [one for one in self.zombies if one.state in ("gone", "done")]
        for one in over:
            one.connection.close()
            self.zombies.remove(one)
        self._send_copies()

    def _send_copies(self) -> None:
        carrier = self.carrier
        carrier.process()
        now_ns = carrier.now_ns()
        carrier.tick(now_ns)
        for copy in [one for one in self.copies if now_ns >= one.due_ns]:
            if not carrier.is_ready or (copy.size and not carrier.session.may_send(copy.size)):
                if carrier.is_ready:
                    carrier.request(Api.CREDIT, [credit_messages.encode_credit(copy.size)], None)
                return
            if carrier.request(copy.api, copy.body, _ignore):
                carrier.session.sent_bytes += copy.size
                self.copies.remove(copy)

    # ---- a transformer's input -------------------------------------------------------------------

    def seek(self, offset: int) -> None:
        assert self.consumer is not None
        assert self.source is not None
        self.consumer.seek(self.source, offset)
        self.received = []

    def inputs(self, offset: int) -> list[tuple[int, bytes]]:
        """Some committed records from `offset` on."""
        assert self.consumer is not None
        try:
            for record in self.consumer.poll(0):
                assert record.value is not None
                assert self.source is not None
                self.received.append((record.offset, record.value))
        except TailraceError as error:
            if error.code not in REPEATED | {ErrorCode.STORAGE_ERROR}:
                raise
        return [one for one in self.received if one[0] >= offset][:INPUTS_MAX]

    # ---- rest ------------------------------------------------------------------------------------

    @property
    def is_at_rest(self) -> bool:
        return (
            not self.copies
            and not self.zombies
            and bool(self.lives)
            and all(one.state == "idle" and not one.is_waiting for one in self.lives)
        )

    def next_wake_ns(self, now_ns: int) -> int:
        ticks = [one.next_wake_ns(now_ns) for one in self._all()]
        carrier_ns = self.carrier.next_tick_ns()
        return min(
            [*ticks, *([carrier_ns] if carrier_ns else []), *(c.due_ns for c in self.copies)]
        )

    def _all(self) -> Iterator[Instance]:
        for life in self.lives:
            yield life
            if life.tasks:
                yield from life.attempts
        yield from self.zombies

    def is_ready(self, now_ns: int) -> bool:
        """True if it has something to do."""
        for one in self._all():
            if _has_input(one.connection) or one.next_wake_ns(now_ns) <= now_ns:
                return True
        for one in self.lives:
            if one.member is not None and _has_input(one.member.connection):
                return True
        return (
            _has_input(self.carrier)
            or 0 < (self.carrier.next_tick_ns() or 0) <= now_ns
            or any(copy.due_ns <= now_ns for copy in self.copies)
        )


def _has_input(connection: Connection) -> bool:
    socket: Any = connection._socket
    return socket is not None and bool(socket.link.to_client)


def _ignore(_: Response | None) -> None:
    """Nobody waits for the answer of a copy."""


def _ended_in(common: Common, place: TopicPartition) -> set[tuple[int, int]] | None:
    """(producer id, epoch) of the transactions whose marker readers see in a partition. None: it is
    not open.
    """
    world, info = common.world, common.topics[place.topic]
    watermark = world.high_watermark(info.topic_id, place.partition)
    if watermark is None:
        return None
    files = SimFiles(world.disk)
    found: set[tuple[int, int]] = set()
    for data_dir in world.data_dirs:
        directory = f"{data_dir}/{place.topic}-{place.partition}"
        if not files.exists(directory):
            continue
        for base in segment_bases(files.list(directory)):
            data = read_whole(files, f"{directory}/{file_name(base)}")

            def read_at(length: int, position: int, data: bytes = data) -> bytes:
                return data[position : position + length]

            walk = Walk(schema_message_length(read_at), base)
            for _, header in walk_batches(read_at, len(data), walk, info.seeds[place.partition]):
                if header.is_marker and header.base_offset < watermark:
                    found.add((header.producer_id, header.producer_epoch))
    return found
