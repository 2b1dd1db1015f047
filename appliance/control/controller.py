"""The controller: decides about topics and producers, and publishes the decisions.

Owner: the catalog (SQLite); in shared memory the lanes from it, and which process has its feed
(`appliance.control.publishing.metadata_publisher`). It waits on its doorbell: requests come from
the fronts over lanes (docs/adr/0001).
Invariants:
- A request is consumed before it is parsed (`request_handler`).
- A step commits once for all its requests. A decision is on the disk before it is published.
- A client is answered when the flusher has carried the decision out (its slot in the partition
  table shows the version).
Bounds:
- ANSWERS_MAX pending answers of a front; its requests are not read beyond that.
- See `appliance.control.topics.change_queue` for the rest.
Crash:
- Decisions in state `changing` or `deleting` are published again at start, which is idempotent.
- Fronts fail the requests that a former controller had not answered.

Run as `python -P -m appliance.control.controller`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance.catalog.catalog import Catalog, MissingDirectoryError, PartitionRow, Topic
from appliance.catalog.moved_partitions import MovedPartitions
from appliance.catalog.recovery import (
    CatalogBusyError,
    CatalogUnusableError,
    live_slots,
    open_catalog,
)
from appliance.control.describe_cluster import ClusterDescription
from appliance.control.host_view import Host, HostView
from appliance.control.offset_leases import OffsetLeases
from appliance.control.partition_moves import PartitionMoves, closed_arrivals
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from appliance.control.placement.partition_placement import PartitionPlacement
from appliance.control.producer_ids import ProducerIds
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher, Sizes
from appliance.control.request_fields import Requester
from appliance.control.request_handler import RequestHandler
from appliance.control.settings.config_commands import ConfigCommands
from appliance.control.topics.bin import TopicBin
from appliance.control.topics.change_queue import TopicChangeQueue
from appliance.control.topics.compaction_requests import CompactionRequests
from appliance.control.topics.defaults import TopicDefaults
from appliance.control.topics.topic_commands import TopicCommands
from appliance.control.users.rights import Rights
from appliance.data.data_dir_lock import directory_id
from appliance.supervise.processes.restart_policy import ExitCode
from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneReader
from shm.runtime.agent_runner import ProcessContext, configure_logging, process_name, run, start
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import ProcessSlot
from shm.tables.partition_table import PartitionState
from shm.tables.settings_block import SettingsBlock
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidSettingError
from tailrace.protocol.json_messages import encode_reply

if TYPE_CHECKING:
    from appliance.control.audit_writer import AuditWriter

logger = logging.getLogger(__name__)

PENDING_RETRY_NS = 50_000_000
ANSWERS_MAX = 64


class Parts(NamedTuple):
    """The parts that a step visits."""

    publisher: MetadataPublisher
    changes: TopicChangeQueue
    commands: TopicCommands
    topic_bin: TopicBin
    moves: PartitionMoves
    leases: OffsetLeases[LaneSender]
    topic_defaults: TopicDefaults
    configs: ConfigCommands
    producer_ids: ProducerIds
    host_view: HostView


class Controller:
    """An agent (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        catalog: Catalog,
        parts: Parts,
        requests: RequestHandler,
        incoming: dict[int, LaneReader],
        slot: ProcessSlot,
        error_handler: CountedErrorHandler,
        send: Callable[[Requester, ErrorCode, bytes], None],
        answer_max: int,
        start_ns: int,
    ) -> None:
        """`incoming`: the lane of each front. `send`: answers a client."""
        self._catalog = catalog
        self._publisher = parts.publisher
        self._changes = parts.changes
        self._commands = parts.commands
        self._bin = parts.topic_bin
        self._moves = parts.moves
        self._leases = parts.leases
        self._topic_defaults = parts.topic_defaults
        self._configs = parts.configs
        self._producer_ids = parts.producer_ids
        self._host_view = parts.host_view
        self._requests = requests
        self._incoming = incoming
        self._slot = slot
        self._error_handler = error_handler
        self._send = send
        self._answer_max = answer_max
        self._now_ns = start_ns

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self._topic_defaults.change(dict(settings["topic_defaults"]))
        self._host_view.use_settings(settings)
        self._commands.deletions_kept_ms = int(settings["topic.delete.retention.ms"])
        self._commands.quotas = settings["quotas"]

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """Run one step of the loop: feeds, requests, finished decisions, one commit for all,
        waiting messages.
        """
        self._now_ns = now_ns
        work = self._publisher.connect_workers() + self._publisher.connect_groups()
        if self._configs.are_in_force():
            work += self._publisher.feed(now_ns)
        self._catalog.begin_step()
        work += self._bin.finish(now_ns)
        work += self._topic_defaults.step(now_ns)
        work += self._producer_ids.give_block(now_ns)
        for front, lane in self._incoming.items():
            room = ANSWERS_MAX - len(self._publisher.to(Role.FRONT, front).queue)
            while room > 0 and (message := lane.peek()) is not None:
                requester, api, payload = (
                    Requester(front, message.session, message.correlation_id),
                    message.slot,
                    bytes(message.payload),
                )
                kind = message.kind
                lane.advance(message)
                lane.consume()  # first, so that a request that fails is not read again
                work += 1
                room -= 1
                if kind == LaneKind.REQUEST:
                    self._requests.handle(requester, api, payload, now_ns)
        work += self._changes.decide_and_note(now_ns)
        work += self._bin.step(now_ns) + self._moves.step(now_ns)
        if self._catalog.commit_step(self._error_handler.on_error):
            self._slot.store(
                ProcessWord.COMMIT_COUNT, self._slot.load(ProcessWord.COMMIT_COUNT) + 1
            )
        work += self._changes.answer(now_ns) + self._leases.answer_taken(now_ns)
        work += self._configs.answer_applied(now_ns)
        work += self._bin.answer(now_ns, self._send, self._answer_max)
        return work + self._publisher.send(now_ns)

    def has_more(self) -> bool:
        return True

    def next_deadline_ns(self) -> int | None:
        """The time of the next step: soon while a message waits for another process, which rings
        when it frees the lane or changes the table; None: wait for the doorbell.
        """
        if self._now_ns < self._producer_ids.retry_at_ns:
            return min(self._producer_ids.retry_at_ns, self._now_ns + PENDING_RETRY_NS)
        return (
            self._now_ns + PENDING_RETRY_NS
            if self._changes.is_waiting()
            or self._moves.is_waiting
            or self._leases.is_waiting
            or self._publisher.is_behind()
            or self._configs.is_waiting
            or self._topic_defaults.is_waiting
            or not self._configs.are_in_force()
            else self._bin.next_deadline_ns()
        )

    def begin_stop(self) -> None:
        """Finish nothing: undecided requests time out at their clients."""

    def is_finished(self) -> bool:
        return True


class _Connections:
    """Lanes to the other processes, and the doorbell of the supervisor."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self.supervisor = context.bell(Role.SUPERVISOR, 0)

    def connect(self, role: Role, index: int) -> LaneSender:
        name = process_name(role, index)
        return LaneSender(
            role,
            index,
            self._context.lane_writer(name),
            self._context.bell(role, index),
            self._context.control.process(role, index),
        )

    def connect_worker(self, worker: int) -> LaneSender:
        return self.connect(Role.WORKER, worker)

    def connect_groups(self) -> LaneSender | None:
        """The sender to the group coordinator; None before its start."""
        process = self._context.control.process(Role.GROUPS, 0)
        return self.connect(Role.GROUPS, 0) if process.load(ProcessWord.GENERATION) else None

    def request_scheduler(self) -> None:
        """Ask the supervisor for the scheduler, once."""
        slot = self._context.slot
        if not slot.load(ProcessWord.SCHEDULER_REQUESTED):
            slot.store(ProcessWord.SCHEDULER_REQUESTED, 1)
            self.supervisor.ring()


def build(
    context: ProcessContext, catalog: Catalog, dir_numbers: list[int], machine: Host
) -> Controller:
    """Make the controller of this specification. `dir_numbers`: the catalog's number of each data
    directory.
    """
    spec, settings, clock = context.spec, context.spec.settings, context.clock
    start_ns, error_handler = clock.monotonic_ns(), CountedErrorHandler(context.slot)
    topics = {topic.name: topic for topic in catalog.topics()}
    publisher, dedicated, answer_max = _publisher(context, topics, dir_numbers)

    def send(requester: Requester, code: ErrorCode, body: bytes) -> None:
        publisher.answer(requester.front, requester.session, requester.correlation_id, code, body)

    def state_of(row: PartitionRow) -> PartitionState:
        return publisher.table(row).read(row.slot)

    leases = _leases(context, catalog, publisher, lambda item: commands.existing(item), answer_max)
    host_view = _host_view(context, dedicated, machine)
    topic_bin = TopicBin(
        catalog, host_view, lambda row: publisher.placement.known_dir_index(row),
        lambda index, topic_id: publisher.to(Role.FLUSHER, index).put(LaneKind.PURGE, topic_id),
        publisher.publish_purged, leases.elapsed_ms, leases.keep_time, clock.wall_us,
    )  # fmt: skip
    commands = TopicCommands(
        catalog, topics, dedicated, state_of, clock.wall_us, topic_bin=topic_bin,
        ring_bytes=int(settings["ring_bytes"]), lane_bytes=int(settings["lane_bytes"]),
        topic_defaults=publisher.topic_defaults,
    )  # fmt: skip
    commands.deletions_kept_ms = int(settings["topic.delete.retention.ms"])
    commands.quotas = settings["quotas"]
    for topic in topics.values():
        publisher.placement.assign(topic)
    publisher.connect_workers()
    rights = Rights(catalog, publisher, clock.wall_us)
    publisher.feed_leases = lambda out: leases.feed(out, topics.values())
    publisher.kept_topics = topic_bin.kept
    publisher.feed_rights = rights.feed
    moved = MovedPartitions(catalog)
    publisher.departing.update(closed_arrivals(moved))
    changes = TopicChangeQueue(
        catalog, topics, publisher, commands, topic_bin, error_handler, answer_max
    )
    moves = PartitionMoves(catalog, moved, topics, publisher, changes, leases, host_view, start_ns)
    catalog.slots.takes_writes = lambda number: host_view.takes_writes(
        publisher.placement.index_of(number)
    )
    catalog.slots.is_drained = lambda number: host_view.is_drained(
        publisher.placement.index_of(number)
    )
    commands.begin_move = moves.begin
    description = ClusterDescription(
        topics, publisher, host_view, topic_bin, spec.instance, answer_max
    )
    description.moves = moves.described
    audit = _audit_writer(context)
    if audit is not None:
        description.audit = audit.described
    configs = _config_commands(context, catalog, send, answer_max)
    producer_ids = ProducerIds(
        catalog, publisher,
        context.control.process(Role.GROUPS, 0).cell(ProcessWord.TRANSACTIONS_REQUESTED),
        clock.wall_us, send, start_ns,
    )  # fmt: skip
    topic_defaults = TopicDefaults(
        catalog, topics, publisher, changes, dict(settings["topic_defaults"]),
        is_restarted=spec.generation > 1,
    )  # fmt: skip
    requests = RequestHandler(
        catalog=catalog, changes=changes, commands=commands, topic_bin=topic_bin, leases=leases,
        compaction=_compaction(context, publisher, commands, state_of), configs=configs,
        producer_ids=producer_ids, rights=rights, description=description,
        audit=audit, send=send, error_handler=error_handler,
        answer_max=answer_max,
    )  # fmt: skip
    parts = Parts(
        publisher, changes, commands, topic_bin, moves, leases, topic_defaults, configs,
        producer_ids, host_view,
    )  # fmt: skip
    fronts = range(int(settings["fronts"]))
    incoming = {front: context.lane_reader(process_name(Role.FRONT, front)) for front in fronts}
    controller = Controller(
        catalog, parts, requests, incoming, context.slot, error_handler, send, answer_max, start_ns
    )
    if settings.get("security"):
        rights.ensure_administrator(spec.data_dirs[0], settings["listen"])
    context.report_ready()
    for front in fronts:  # they compare the controller's generation
        context.bell(Role.FRONT, front).ring()
    return controller


def _leases(
    context: ProcessContext,
    catalog: Catalog,
    publisher: MetadataPublisher,
    existing: Callable[[dict[str, Any]], Topic],
    answer_max: int,
) -> OffsetLeases[LaneSender]:
    return OffsetLeases(
        catalog.database, context.clock.monotonic_ns, existing,
        lambda row: publisher.to(Role.FLUSHER, publisher.placement.dir_index(row)),
        lambda out, slot, payload: out.put(LaneKind.LEASE, payload, slot=slot), publisher.table,
        lambda to, code,
        value: publisher.answer(to.front, to.session, to.correlation_id,
        *encode_reply(code, value, answer_max)),
    )  # fmt: skip


def _compaction(
    context: ProcessContext,
    publisher: MetadataPublisher,
    commands: TopicCommands,
    state_of: Callable[[PartitionRow], PartitionState],
) -> CompactionRequests:
    return CompactionRequests(
        commands.existing, state_of,
        lambda row, payload: publisher.to(Role.FLUSHER, publisher.placement.dir_index(row)).put(
            LaneKind.COMPACT, payload
        ),
        context.clock.monotonic_ns, publisher.topic_defaults,
    )  # fmt: skip


def _publisher(
    context: ProcessContext, topics: dict[str, Topic], dir_numbers: list[int]
) -> tuple[MetadataPublisher, DedicatedWorkers, int]:
    """The publisher, the dedicated workers that it connects, and the limit of an answer's body."""
    settings, data_dirs = context.spec.settings, context.spec.data_dirs
    connections = _Connections(context)
    dedicated = DedicatedWorkers(
        {w: context.control.process(Role.WORKER, w) for w in settings["spare_workers"]},
        len(data_dirs),
    )
    placement = PartitionPlacement(
        topics, dir_numbers, list(settings["worker_dirs"]), dedicated, connections.supervisor
    )
    # Clients of the SDK get a front for each partition, and no gateway.
    fronts = int(settings["fronts"]) - int(settings.get("gateways", 0))
    outgoing = [
        connections.connect(role, index)
        for role, index in [*_processes(context), (Role.SCHEDULER, 0)]
    ]
    publisher = MetadataPublisher(
        topics,
        outgoing,
        [context.table(d) for d in range(len(data_dirs))],
        placement,
        dedicated,
        connections.connect_worker,
        connections.connect_groups,
        connections.request_scheduler,
        Sizes(fronts, int(settings["ring_bytes"]), int(settings["lane_bytes"])),
        dict(settings["topic_defaults"]),
    )
    return (
        publisher,
        dedicated,
        min(out.lane.payload_max for out in outgoing if out.role is Role.FRONT),
    )


def _processes(context: ProcessContext) -> list[tuple[Role, int]]:
    """The processes that run from the start on: fronts, workers, flushers."""
    settings = context.spec.settings
    return [
        *((Role.FRONT, front) for front in range(int(settings["fronts"]))),
        *((Role.WORKER, worker) for worker in range(len(settings["worker_dirs"]))),
        *((Role.FLUSHER, index) for index in range(len(context.spec.data_dirs))),
    ]


def _host_view(context: ProcessContext, dedicated: DedicatedWorkers, machine: Host) -> HostView:
    settings = context.spec.settings
    host_view = HostView(
        machine,
        context.control,
        context.spec.data_dirs,
        _processes(context),
        dedicated,
        reserve_bytes=int(settings["reserve_bytes"]),
        http_listen=settings["http.listen"],
    )
    host_view.use_settings(settings)
    return host_view


def _config_commands(
    context: ProcessContext,
    catalog: Catalog,
    send: Callable[[Requester, ErrorCode, bytes], None],
    answer_max: int,
) -> ConfigCommands:
    in_force, overrides = (
        SettingsBlock(context.attach(name, RegionKind.SETTINGS))
        for name in ("settings", "overrides")
    )
    bell = context.bell(Role.SUPERVISOR, 0)
    return ConfigCommands(catalog, in_force, overrides, context.control, bell, send, answer_max)


def _audit_writer(context: ProcessContext) -> AuditWriter | None:
    settings = context.spec.settings.get("audit")
    if settings is None:
        return None
    from appliance.control.audit_writer import AuditWriter  # only who has an audit log

    return AuditWriter(settings, context.clock.wall_us)


def main() -> None:
    """Run the process."""
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
        controller = build(context, catalog, dir_numbers, Host())
    except InvalidSettingError as error:
        print(f"tailrace: {error.detail}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.CONFIG)
    run(controller, context, apply=controller.apply_settings)
    catalog.close()


if __name__ == "__main__":
    main()
