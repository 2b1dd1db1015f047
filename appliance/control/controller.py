"""The coordinator: decides about topics and producers, and tells everybody else.

Owner: the catalog (SQLite); in shared memory the lanes that lead from it, and who has been fed (`appliance.telling`).
Waits on its doorbell: requests come from the fronts over lanes, like everything between processes (docs/adr/0001).
Invariants: a request is consumed before it is looked at, and whatever it holds is answered with a code and a sentence; a step commits once for all that it
    took in; a decision is on the disk before anyone is told; a client is answered when the flusher has carried the decision out (its slot in the partition
    table shows the version).
Bounds: of a front that does not take its answers, no more requests are read than ANSWERS_MAX; see `appliance.changes` for the rest.
Crash: decisions in state `changing` or `deleting` are told again at start; telling twice changes nothing. Requests that were read but not
    answered are given up by their fronts, which see that another coordinator runs.

Run as `python -P -m appliance.coordinator`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson

from appliance.catalog import Catalog, MissingDirectoryError, Topic
from appliance.catalog_recovery import CatalogBusyError, CatalogUnusableError, live_slots, open_catalog
from appliance.changes import CHANGES, Changes, Requester
from appliance.cluster_description import ClusterDescription
from appliance.dedicated_workers import DedicatedWorkers
from appliance.leases import Leases
from appliance.outgoing import Outgoing
from appliance.ownership import directory_id
from appliance.placement import Placement
from appliance.restart_policy import ExitCode
from appliance.surroundings import Machine, Surroundings
from appliance.telling import Sizes, Telling
from appliance.topic_decisions import TopicDecisions, is_whole
from shm.catalog_messages import LaneKind
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.lane import LaneReader
from shm.layout import ProcessWord, Role
from shm.runtime.boundary import Boundary
from shm.runtime.process import ProcessContext, configure_logging, process_name, run, start
from tailrace.errors import InvalidRequestError, InvalidSettingError, TailraceError
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import decode_json, encode_error, encode_reply
from tailrace.protocol.wire import Api

logger = logging.getLogger(__name__)

PENDING_RETRY_NS = 50_000_000
ANSWERS_MAX = 64


class Coordinator:
    """An agent (see `shm.runtime.process`)."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        topics: dict[str, Topic],
        telling: Telling,
        decisions: TopicDecisions,
        description: ClusterDescription,
        slot: ProcessSlot,
        boundary: Boundary,
        incoming: dict[int, LaneReader],
        answer_max: int,
        leases: Leases[Outgoing],
        start_ns: int,
    ) -> None:
        self._catalog = catalog
        self._telling = telling
        self._decisions = decisions
        self._description = description
        self._slot = slot
        self._boundary = boundary
        self._incoming = incoming
        self._answer_max = answer_max
        self._now_ns = start_ns
        for topic in topics.values():
            telling.placement.give(topic)
        telling.connect_workers()
        telling.feed_leases = lambda out: leases.feed(out, topics.values())
        self._leases = leases
        self._changes = Changes(catalog, topics, telling, decisions, boundary, answer_max, start_ns)

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """One turn of the loop: feeds, requests, decisions that are carried out, one commit for all of them, what waits for lanes."""
        self._now_ns = now_ns
        work = self._telling.connect_workers() + self._telling.connect_groups()
        work += self._telling.feed(hold_readers=self._changes.is_inheriting(now_ns))
        self._catalog.begin_step()
        for front, lane in self._incoming.items():
            room = ANSWERS_MAX - len(self._telling.to(Role.FRONT, front).queue)
            while room > 0 and (message := lane.peek()) is not None:
                requester, api, payload = Requester(front, message.session, message.correlation_id), message.slot, bytes(message.payload)
                kind = message.kind
                lane.advance(message)
                lane.consume()  # first: whatever comes of it, it is not read again
                work += 1
                room -= 1
                if kind == LaneKind.REQUEST:
                    self._handle(requester, api, payload)
        work += self._changes.decide_and_note(now_ns)
        if self._catalog.commit_step(self._boundary.caught):
            self._slot.store(ProcessWord.COMMIT_COUNT, self._slot.load(ProcessWord.COMMIT_COUNT) + 1)
        work += self._changes.answer(now_ns) + self._leases.answer_taken(now_ns)
        return work + self._telling.send(now_ns)

    def has_more(self) -> bool:
        return True

    def next_deadline_ns(self) -> int | None:
        # A lane that is full, or a table that is about to change: the process that moves it rings, but look again in any case.
        """Soon, while something waits for another process; None: on the doorbell alone."""
        return (
            self._now_ns + PENDING_RETRY_NS if self._changes.is_waiting() or self._leases.is_waiting or self._telling.is_behind() else None
        )

    def begin_stop(self) -> None:
        """Nothing to finish: undecided requests time out at their clients."""

    def is_finished(self) -> bool:
        return True

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def _handle(self, requester: Requester, api: int, payload: bytes) -> None:
        """One request, inside the boundary of the loop. Whatever it holds, the answer is a code and a sentence."""
        try:
            if api in CHANGES:
                self._changes.take(requester, Api(api), payload, self._now_ns)
                return
            if api == Api.LEASE_OFFSETS:
                failed = self._leases.take(requester, decode_json(payload), self._now_ns)
                self._catalog.afterwards(lambda: None, failed)
                return
            if api == Api.INIT_PRODUCER_ID:
                self._init_producer(requester, decode_json(payload))
                return
            code, body = encode_reply(ErrorCode.OK, self._answer(api, decode_json(payload)), self._answer_max)
        except TailraceError as error:
            code, body = error.code, encode_error(error.detail)
        except Exception as error:  # the boundary of one request
            code, body = ErrorCode.INTERNAL_ERROR, encode_error(self._boundary.caught(f"api={api} session={requester.session}", error))
        self._send(requester, code, body)

    def _answer(self, api: int, request: dict[str, Any]) -> dict[str, Any]:
        """Raises TailraceError."""
        if api == Api.DESCRIBE_CLUSTER:
            return self._description.describe(request)
        raise TailraceError(f"API {api} is not the coordinator's", ErrorCode.UNKNOWN_API)

    def _init_producer(self, requester: Requester, request: dict[str, Any]) -> None:
        """Answered when it is committed. Raises TailraceError."""
        producer_id, epoch = request.get("producer_id"), request.get("producer_epoch", 0)
        if producer_id is None:
            producer_id, epoch = self._catalog.new_producer()
        elif is_whole(producer_id, 0, 2**62) and is_whole(epoch, -1, 32767):
            producer_id, epoch = self._catalog.next_epoch(producer_id, epoch)
        else:
            raise InvalidRequestError("producer_id and producer_epoch must be whole numbers")
        body = orjson.dumps({"producer_id": producer_id, "producer_epoch": epoch})

        def kept() -> None:
            crash_point("coordinator.after_producer_id")
            self._send(requester, ErrorCode.OK, body)

        self._catalog.afterwards(kept, lambda error: self._send(requester, error.code, encode_error(error.detail)))

    def _send(self, requester: Requester, code: ErrorCode, body: bytes) -> None:
        self._telling.answer(requester.front, requester.session, requester.correlation_id, code, body)


def build(context: ProcessContext, catalog: Catalog, dir_numbers: list[int], machine: Machine) -> Coordinator:
    """The coordinator of this specification. `dir_numbers`: what the catalog calls each data directory."""
    spec, settings, control = context.spec, context.spec.settings, context.control
    worker_dirs, front_count = list(settings["worker_dirs"]), int(settings["fronts"])
    roles = [(Role.FRONT, f) for f in range(front_count)]
    roles += [(Role.SCHEDULER, 0), *((Role.WORKER, w) for w in range(len(worker_dirs)))]
    roles += [(Role.FLUSHER, d) for d in range(len(spec.data_dirs))]

    def connect(role: Role, index: int) -> Outgoing:
        name = process_name(role, index)
        return Outgoing(role, index, context.lane_writer(name), context.bell(role, index), control.process(role, index))

    def connect_groups() -> Outgoing | None:
        return connect(Role.GROUPS, 0) if control.process(Role.GROUPS, 0).load(ProcessWord.GENERATION) else None

    tables = [context.table(d) for d in range(len(spec.data_dirs))]
    topics = {topic.name: topic for topic in catalog.topics()}
    dedicated = DedicatedWorkers({w: control.process(Role.WORKER, w) for w in settings["spare_workers"]}, len(spec.data_dirs))
    placement = Placement(topics, dir_numbers, worker_dirs, dedicated, context.bell(Role.SUPERVISOR, 0))
    sizes = Sizes(front_count, int(settings["ring_bytes"]), int(settings["lane_bytes"]))
    outgoing = [connect(role, index) for role, index in roles]
    telling = Telling(topics, outgoing, tables, placement, dedicated, lambda worker: connect(Role.WORKER, worker), connect_groups, sizes)
    decisions = TopicDecisions(
        catalog, topics, dedicated, lambda row: telling.table(row).read(row.slot), context.clock.wall_us, ring_bytes=sizes.ring_bytes,
        lane_bytes=sizes.lane_bytes,
    )  # fmt: skip
    answer_max = min(out.lane.payload_max for out in outgoing if out.role is Role.FRONT)
    leases: Leases[Outgoing] = Leases(
        catalog.database, context.clock.wall_us, decisions.existing, lambda row: telling.to(Role.FLUSHER, placement.dir_index(row)),
        lambda out, slot, payload: out.put(LaneKind.LEASE, payload, slot=slot), telling.table,
        lambda to, code, value: telling.answer(to.front, to.session, to.correlation_id, *encode_reply(code, value, answer_max)),
    )  # fmt: skip
    surroundings = Surroundings(
        machine,
        control,
        spec.data_dirs,
        roles,
        dedicated,
        reserve_bytes=int(settings["reserve_bytes"]),
        http_listen=settings["http.listen"],
    )
    coordinator = Coordinator(
        catalog=catalog, topics=topics, telling=telling, decisions=decisions, leases=leases,
        description=ClusterDescription(topics, telling, surroundings, spec.instance, answer_max),
        slot=context.slot, boundary=Boundary(context.slot), incoming={f: context.lane_reader(process_name(Role.FRONT, f)) for f in range(front_count)},
        answer_max=answer_max, start_ns=context.clock.monotonic_ns(),
    )  # fmt: skip
    context.report_ready()
    for front in range(front_count):  # they look whether this is another generation
        context.bell(Role.FRONT, front).ring()
    return coordinator


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    spec = context.spec
    tables = [context.table(d) for d in range(len(spec.data_dirs))]
    try:
        catalog, dir_numbers = open_catalog(
            [(directory_id(path), path) for path in spec.data_dirs],
            int(spec.settings["slots"]),
            live_slots(tables),
            context.clock.wall_us(),
        )
    except MissingDirectoryError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.CONFIG)
    except CatalogUnusableError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.DATA_UNUSABLE)
    except CatalogBusyError as error:  # the supervisor tries again
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.FAILED)
    try:
        coordinator = build(context, catalog, dir_numbers, Machine())
    except InvalidSettingError as error:
        print(f"tailrace: {error.detail}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.CONFIG)
    run(coordinator, context)
    catalog.close()


if __name__ == "__main__":
    main()
