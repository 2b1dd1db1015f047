"""A front without processes, sockets and disks around it: its messages, lanes, partitions and clock
are a test's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import orjson

from netfront.access.gate import Gate
from netfront.agent.front_agent import Front, Links
from netfront.fetch.log.isolation import Isolation
from netfront.fetch.log.read_result import ColdRead, LogReadError, Place, Span
from netfront.forward.forwarder import ForwarderLink, OnDemand
from netfront.partition_routes import PartitionRoutes
from netfront.produce.ring_acks import AckWalker
from netfront.produce.worker_link import WorkerLink
from netfront.socket.flow_control import Credit, CreditLedger
from netfront.socket.transport import Watched
from netfront.socket.zap import Claim
from shm.memory.layout import (
    ControlLayout,
    LaneLayout,
    ProcessWord,
    RegionKind,
    RingLayout,
    Role,
    SlotState,
    Verdict,
)
from shm.messages.lane_messages import Assignment, LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneMessage, LaneReader, LaneWriter
from shm.queues.ring import Ring, RingWriter
from shm.runtime.agent_runner import Clock
from shm.runtime.timing_wheel import NEVER_NS
from shm.tables.control import Control, ProcessSlot
from shm.tables.partition_table import PartitionState
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.format.crc32c import Readable
from tailrace.protocol import fetch_messages, produce_messages
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    decode_response_header,
    encode_request,
)
from tests.kit.memory import simulated
from tests.kit.stepped.front_invariants import check_front

MS = 1_000_000
LANE_BYTES = 1 << 18
RING_BYTES = 1 << 16
DESCRIPTORS = 8192


class SilentBell(Doorbell):
    def __init__(self) -> None:
        super().__init__(-1)

    def ring(self) -> None:
        pass

    def clear(self) -> None:
        pass


class FakeTransport:
    """Messages in lists."""

    def __init__(self) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.answers: dict[bytes, deque[list[bytes]]] = {}
        self.unsent: dict[bytes, int] = {}
        self.others_unsent = 0
        self.closed: dict[bytes, str] = {}
        """Connections that the front has closed, and why."""

    def try_receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def try_send(self, identity: bytes, frames: Sequence[Readable]) -> bool:
        self.answers.setdefault(identity, deque()).append([bytes(frame) for frame in frames])
        return True

    def try_send_buffer(
        self, identity: bytes, frames: Sequence[Readable], data: memoryview
    ) -> bool:
        return self.try_send(identity, [*frames, data])

    def new_buffer(self, size: int) -> bytearray:
        return bytearray(size)

    def unsent_bytes(self, identity: bytes) -> int:
        return self.unsent.get(identity, 0)

    def unsent_total(self) -> int:
        return self.others_unsent + sum(self.unsent.values())

    watch_at_ns = NEVER_NS

    def watch(self, now_ns: int) -> Watched:
        del now_ns
        return Watched([], 0)

    claims: dict[bytes, Claim]

    def claim(self, identity: bytes) -> Claim | None:
        return getattr(self, "claims", {}).get(identity)

    def shaken(self, identity: bytes, credit: Credit | None) -> None:
        """Nobody is closed here for what it costs."""

    def peer_address(self, identity: bytes) -> str:
        del identity
        return "fake"

    def close_peer(self, identity: bytes, reason: str) -> None:
        self.closed[identity] = reason


class FakeLog:
    """`LogReader` over batches in memory; one letter is one byte of a batch, one batch is one
    offset.
    """

    def __init__(self) -> None:
        self.logs: dict[int, list[bytes]] = {}
        self.looks = 0
        self.reads = 0
        self.failure: BaseException | None = None
        self.is_cold = False
        self.segments = 1
        self.files = self

    def state(self, route: Assignment) -> PartitionState:
        self.looks += 1
        if route.slot not in self.logs:
            raise LogReadError(ErrorCode.NOT_READY, "not there")
        state = PartitionState.empty(route.topic_id, route.partition, SlotState.ONLINE, 1)
        return state._replace(
            high_watermark=len(self.logs[route.slot]),
            log_end_offset=len(self.logs[route.slot]),
            last_stable_offset=len(self.logs[route.slot]),
        )

    def check_epoch(
        self, route: Assignment, state: PartitionState, epoch: int, offset: int
    ) -> None:
        pass

    def read(
        self,
        route: Assignment,
        state: PartitionState,
        offset: int,
        hint: Place | None,
        target: memoryview,
        blocking: bool,
        isolation: Isolation,
    ) -> Span | int:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        if self.is_cold and not blocking:
            raise ColdRead(0, 0, 1)
        at, log = 0, self.logs[route.slot]
        while offset < len(log) and at + len(log[offset]) <= len(target):
            target[at : at + len(log[offset])] = log[offset]
            at += len(log[offset])
            offset += 1
        if not at and offset < len(log):
            return len(log[offset])
        return Span(0, at, Place(offset, 0, offset))

    def behind(self, route: Assignment, state: PartitionState, offset: int, end: int) -> int:
        return offset + 1

    def segments_of(
        self, route: Assignment, state: PartitionState, end: int
    ) -> list[tuple[int, int]]:
        return [(number, number + 1) for number in range(self.segments)]

    def place_of_time(
        self, route: Assignment, base: int, timestamp_us: int, at_least: int
    ) -> Place | None:
        self.looks += 1
        return None

    def forget(self, route: Assignment) -> None:
        self.logs.pop(route.slot, None)


class FakePool:
    def __init__(self) -> None:
        self.submitted: list[object] = []
        self.done: list[object] = []

    def submit(self, fd: int, position: int, length: int, token: object) -> None:
        self.submitted.append(token)

    def completed(self) -> list[object]:
        done, self.done = self.done, []
        return done


class FakeForwarder:
    """A controller or scheduler at the other ends of its lanes."""

    def __init__(self, control: Control, role: Role) -> None:
        to_it, from_it = (
            simulated(RegionKind.LANE, LaneLayout(LANE_BYTES).size, LANE_BYTES) for _ in range(2)
        )
        self.slot = control.process(role, 0)
        self.slot.store(ProcessWord.GENERATION, 1)
        self._to_it = to_it
        self.requests = LaneReader(to_it)
        self.answers = LaneWriter(from_it)
        self.link = ForwarderLink(
            LaneWriter(to_it),
            LaneReader(from_it),
            SilentBell(),
            lambda: self.slot.load(ProcessWord.GENERATION),
        )

    def take(self) -> LaneMessage | None:
        """Consume a request, as a decider does before it handles it."""
        message = self.requests.peek()
        if message is not None:
            self.requests.advance(message)
            self.requests.consume()
        return message

    def answer(self, message: LaneMessage, value: dict[str, Any]) -> None:
        assert self.answers.try_write(
            LaneKind.RESPONSE,
            message.slot,
            0,
            message.session,
            message.correlation_id,
            0,
            (orjson.dumps(value),),
        )
        self.answers.commit()

    def refuse(self, message: LaneMessage, code: ErrorCode, sentence: str) -> None:
        assert self.answers.try_write(
            LaneKind.RESPONSE, message.slot, int(code), message.session, message.correlation_id, 0,
            (requests.encode_error(sentence),),
        )  # fmt: skip
        self.answers.commit()

    def push(self, word: int, api: int, value: dict[str, Any]) -> None:
        assert self.answers.try_write(LaneKind.PUSH, api, 0, word, 0, 0, (orjson.dumps(value),))
        self.answers.commit()

    def restart(self) -> None:
        """Killed; the supervisor has begun to start another."""
        self.slot.store(ProcessWord.GENERATION, self.slot.load(ProcessWord.GENERATION) + 1)

    def begin(self) -> None:
        """The successor has started."""
        self.requests = LaneReader(self._to_it)
        self.requests.begin(self.slot.load(ProcessWord.GENERATION))

    def tell(self, assignment: Assignment) -> None:
        assert self.answers.try_write(LaneKind.ASSIGN, 0, 0, 0, 0, 0, (assignment.encode(),))
        self.answers.commit()


class FakeWorker:
    """A worker at the other ends of its lane and ring: it does with a batch what the test says."""

    def __init__(self, generation: int, lane_bytes: int) -> None:
        lane = simulated(RegionKind.LANE, LaneLayout(lane_bytes).size, lane_bytes)
        ring = simulated(
            RegionKind.RING, RingLayout(RING_BYTES, DESCRIPTORS).size, RING_BYTES, DESCRIPTORS
        )
        self.lane, self.ring = LaneReader(lane), RingWriter(ring)
        seen = Ring(ring)
        self.link = WorkerLink(LaneWriter(lane), SilentBell(), seen, AckWalker(seen, 0, generation))
        self.next_offset = 0

    def take(self) -> tuple[LaneMessage, bytes] | None:
        """Take the next batch out of the lane: its message, and its bytes."""
        message = self.lane.peek()
        if message is None:
            return None
        batch = bytes(message.payload)
        self.lane.advance(message)
        self.lane.consume()
        return message, batch

    def acquire_all(self) -> list[tuple[LaneMessage, bytes]]:
        return list(iter(self.take, None))

    def answer(self, message: LaneMessage, code: ErrorCode = ErrorCode.OK, flags: int = 0) -> int:
        """Give a batch its descriptor, and the flusher's word on it; returns the offset that it
        got.
        """
        self.ring.reclaim([0])
        offset, self.next_offset = self.next_offset, self.next_offset + 1
        number = self.ring.next_number
        self.ring.write(
            self.ring.next_position, 0, message.slot, offset, offset + 1, message.session,
            message.correlation_id, message.next_position,
            message.flags | flags, 0, int(code), -1, -1, -1, 0, 3, 1_000 + offset, 0,
        )  # fmt: skip
        self.ring.judge(number, Verdict.DURABLE)
        self.ring.commit()
        self.ring.settled.store(self.ring.next_number)
        return offset

    def work(self) -> int:
        """Append everything that is in the lane; returns how many batches."""
        taken = self.acquire_all()
        for message, _ in taken:
            self.answer(message)
        return len(taken)


class FakeFront:
    """The front under test, with its world."""

    def __init__(
        self,
        workers: int = 0,
        lane_bytes: int = 1 << 16,
        ledger: CreditLedger | None = None,
        log: Any = None,
        audit: dict[str, Any] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`log`: a `LogReader`, instead of logs in memory. `audit`: settings of the audit log.
        `gate`: users and rights.
        """
        self.workers = [FakeWorker(7, lane_bytes) for _ in range(workers)]
        control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.slot: ProcessSlot = control.process(Role.FRONT, 0)
        self.transport, self.pool, self.routing = FakeTransport(), FakePool(), PartitionRoutes()
        self.log = cast("Any", FakeLog() if log is None else log)
        self.controller, self.scheduler = (
            FakeForwarder(control, Role.CONTROLLER),
            FakeForwarder(control, Role.SCHEDULER),
        )
        self.groups = FakeForwarder(control, Role.GROUPS)
        self.has_groups = False
        """True if the process of groups has been started."""
        self.wants_groups = False
        self.has_scheduler = True
        """True if the scheduler has been started."""
        self.wants_scheduler = False
        self.expects_scheduler = False
        """True if the controller has requested it."""
        self.lacks_memory = False
        self.now_ns = 1_000 * MS
        self.wall_ahead_us = 0
        """By how much the wall clock was set."""
        self._version = 0
        links = Links(
            workers={number: worker.link for number, worker in enumerate(self.workers)},
            connect_worker=self._no_worker,
            controller=self.controller.link,
            scheduler=OnDemand(
                lambda: self.scheduler.link if self.has_scheduler else None,
                self._ask_for_scheduler, lambda: False, self.scheduler.answers.payload_max,
                lambda: self.expects_scheduler,
            ),
            groups=OnDemand(
                lambda: self.groups.link if self.has_groups else None, self._ask_for_groups,
                lambda: self.lacks_memory, self.groups.answers.payload_max
            ),
            front_ports=lambda: [7420],
        )  # fmt: skip
        self.front = Front(
            transport=self.transport, generation=7, process_generation=1,
            links=links, routing=self.routing,
            reader=self.log,
            pool=self.pool, ledger=ledger or CreditLedger(1 << 20, 1 << 20, 1 << 16),
            slot=self.slot, cluster_id="fake", auto_create_topics=False,
            on_ready=lambda: None, start_ns=self.now_ns,
            clock=Clock(
                lambda: self.now_ns, lambda: self.now_ns // 1_000 + self.wall_ahead_us
            ), audit=audit, gate=gate,
        )  # fmt: skip
        assert self.controller.answers.try_write(LaneKind.FED, 0, 0, 0, 1, 0, (b"",))
        self.controller.answers.commit()
        self.step()

    def _ask_for_scheduler(self) -> None:
        self.wants_scheduler = True

    def _ask_for_groups(self) -> None:
        self.wants_groups = True

    @staticmethod
    def _no_worker(_worker: int) -> Any:
        return None

    def step(self, after_ms: int = 0) -> int:
        self.now_ns += after_ms * MS
        done = self.front.step(self.now_ns)
        if (
            len(getattr(self.log, "logs", ())) < 100
        ):  # looking at thousands of partitions after every step takes longer than the tests
            check_front(self.front)
        return done

    def settle(self, limit: int = 10_000) -> int:
        """Step until there is nothing to do; returns how many steps did something."""
        for count in range(limit):
            if not self.step() and not self.front.has_more():
                return count
        raise AssertionError("the front never rests")

    def add_topic(self, name: str, partitions: int, schema: bytes = b"") -> list[Assignment]:
        """Make it, with an empty log each."""
        self._version += 1
        topic_id = self._version.to_bytes(16, "big")
        first = len(self.log.logs)
        made = [
            Assignment(
                name, topic_id, p, partitions, first + p, self._version,
                p % max(1, len(self.workers)), 0, 0, 0, schema, False,
                settings={"max.message.bytes": 1024, "delay.enabled": False},
            )
            for p in range(partitions)
        ]  # fmt: skip
        for assignment in made:
            self.routing.apply(assignment)
            self.log.logs[assignment.slot] = []
        return made

    def append(self, assignment: Assignment, batch: bytes = b"x") -> None:
        """A batch becomes durable, and the front hears of it."""
        self.log.logs[assignment.slot].append(batch)
        self.front._fetches.on_settled({assignment.slot})

    def connect(self, name: bytes) -> FakeClient:
        return FakeClient(self, name)


class FakeClient:
    """One connection to it."""

    def __init__(
        self, world: FakeFront, identity: bytes, offered: dict[str, Any] | None = None
    ) -> None:
        """`offered`: versions; what this build speaks unless given."""
        self._world = world
        self.identity = identity
        self._next = 1
        versions = offered or {
            str(int(api)): list(versions) for api, versions in API_VERSIONS.items()
        }
        code, answer = self.ask(
            Api.HANDSHAKE, {"versions": versions, "client_id": identity.decode()}
        )
        assert code is ErrorCode.OK
        self.versions: dict[str, int] = answer["versions"]

    def send(
        self, api: int, *body: bytes, correlation_id: int | None = None, version: int | None = None
    ) -> int:
        if correlation_id is None:
            correlation_id, self._next = self._next, self._next + 1
        version = version or API_VERSIONS[Api(api)][1]
        frames = encode_request(api, version, correlation_id, body)
        self._world.transport.inbox.append([self.identity, *(bytes(frame) for frame in frames)])
        return correlation_id

    def produce(
        self, batches: Sequence[tuple[Assignment, bytes]], *, acks: int = 1, timeout_ms: int = 500
    ) -> int:
        """A PRODUCE request of version 2, its batches in one frame."""
        entries = [
            produce_messages.ProduceEntry(a.topic_id, a.partition, 0, len(batch))
            for a, batch in batches
        ]
        head = produce_messages.encode_produce_batches(
            produce_messages.ProduceBatches(acks, timeout_ms, entries)
        )
        return self.send(Api.PRODUCE, head, b"".join(batch for _, batch in batches))

    def send_json(self, api: int, value: dict[str, Any]) -> int:
        return self.send(api, orjson.dumps(value))

    def fetch(
        self,
        requested: Sequence[Assignment],
        offset: int = 0,
        *,
        max_wait_ms: int = 500,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
    ) -> int:
        entries = [
            fetch_messages.FetchEntry(a.topic_id, a.partition, -1, offset, max_bytes)
            for a in requested
        ]
        return self.send(
            Api.FETCH,
            fetch_messages.encode_fetch(
                fetch_messages.FetchRequest(max_wait_ms, min_bytes, max_bytes, 0, entries)
            ),
        )

    def heard(self) -> dict[int, tuple[ErrorCode, list[bytes]]]:
        """Correlation id -> answer, of those that have come since."""
        result: dict[int, tuple[ErrorCode, list[bytes]]] = {}
        answers = self._world.transport.answers.get(self.identity, deque())
        while answers:
            frames = answers.popleft()
            header = decode_response_header(frames[0])
            if header.correlation_id != PUSH_CORRELATION_ID:
                assert header.correlation_id not in result, "answered twice"
                result[header.correlation_id] = code_of(header.error), frames[1:]
        return result

    def ask(self, api: int, value: dict[str, Any]) -> tuple[ErrorCode, dict[str, Any]]:
        correlation_id = self.send_json(api, value)
        self._world.settle()
        code, body = self.heard()[correlation_id]
        return code, orjson.loads(body[0]) if body else {}


def message_of(answer: tuple[ErrorCode, list[bytes]]) -> str:
    """The sentence of a refusal."""
    return str(orjson.loads(answer[1][0])["message"])


def broken(*_arguments: object) -> None:
    """Put in a handler's place: it fails as nobody expected."""
    raise RuntimeError("nobody expected this")
