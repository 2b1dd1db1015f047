"""Controller process: decides about topics and producers, and publishes the decisions. It opens the
catalog, builds its agent (`appliance.control.controller_agent`) with the parts, and runs it.

Owner: the catalog (SQLite); in shared memory the lanes from it, and which process has its feed
(`appliance.control.publishing.metadata_publisher`). It waits on its doorbell: requests come from
the fronts over lanes (docs/adr/0001).
Crash:
- The agent's: see there.
- Fronts fail the requests that a former controller had not answered.

Run as `python -P -m appliance.control.controller`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from appliance.catalog.catalog import Catalog, MissingDirectoryError, PartitionRow, Topic
from appliance.catalog.moved_partitions import MovedPartitions
from appliance.catalog.recovery import (
    CatalogBusyError,
    CatalogUnusableError,
    live_slots,
    open_catalog,
)
from appliance.control.controller_agent import Controller, Parts
from appliance.control.describe_cluster import ClusterDescription
from appliance.control.host_view import Host, HostView
from appliance.control.moves.partition_moves import PartitionMoves, closed_arrivals
from appliance.control.offset_leases import OffsetLeases
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
from shm.tables.partition_table import PartitionState
from shm.tables.settings_block import SettingsBlock
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidSettingError
from tailrace.protocol.json_messages import encode_reply

if TYPE_CHECKING:
    from appliance.control.audit_writer import AuditWriter


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
    commands = _topic_commands(
        context, catalog, topics, dedicated, state_of, topic_bin, publisher.topic_defaults
    )
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
    commands.begin_move = moves.begin
    commands.is_moving = moves.is_moving
    _use_directory_states(catalog, publisher, host_view)
    audit = _audit_writer(context)
    description = ClusterDescription(
        topics, publisher, host_view, topic_bin, spec.instance, answer_max
    )
    description.moves = moves.described
    if audit is not None:
        description.audit = audit.described
    configs = _config_commands(context, catalog, send, answer_max)
    producer_ids = _producer_ids(context, catalog, publisher, send, start_ns)
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
    controller = Controller(
        catalog, parts, requests, _incoming(context), context.slot, error_handler, send,
        answer_max, start_ns,
    )  # fmt: skip
    if settings.get("security"):
        rights.ensure_administrator(spec.data_dirs[0], settings["listen"])
    _report_ready(context)
    return controller


def _topic_commands(
    context: ProcessContext,
    catalog: Catalog,
    topics: dict[str, Topic],
    dedicated: DedicatedWorkers,
    state_of: Callable[[PartitionRow], PartitionState],
    topic_bin: TopicBin,
    topic_defaults: dict[str, Any],
) -> TopicCommands:
    settings = context.spec.settings
    commands = TopicCommands(
        catalog, topics, dedicated, state_of, context.clock.wall_us, topic_bin=topic_bin,
        ring_bytes=int(settings["ring_bytes"]), lane_bytes=int(settings["lane_bytes"]),
        topic_defaults=topic_defaults,
    )  # fmt: skip
    commands.deletions_kept_ms = int(settings["topic.delete.retention.ms"])
    commands.quotas = settings["quotas"]
    return commands


def _incoming(context: ProcessContext) -> dict[int, LaneReader]:
    """The lane from each front."""
    return {
        front: context.lane_reader(process_name(Role.FRONT, front))
        for front in range(int(context.spec.settings["fronts"]))
    }


def _report_ready(context: ProcessContext) -> None:
    """Tell the supervisor, and the fronts, which compare the controller's generation."""
    context.report_ready()
    for front in range(int(context.spec.settings["fronts"])):
        context.bell(Role.FRONT, front).ring()


def _producer_ids(
    context: ProcessContext,
    catalog: Catalog,
    publisher: MetadataPublisher,
    send: Callable[[Requester, ErrorCode, bytes], None],
    start_ns: int,
) -> ProducerIds:
    requested = context.control.process(Role.GROUPS, 0).cell(ProcessWord.TRANSACTIONS_REQUESTED)
    return ProducerIds(catalog, publisher, requested, context.clock.wall_us, send, start_ns)


def _use_directory_states(
    catalog: Catalog, publisher: MetadataPublisher, host_view: HostView
) -> None:
    """Let new partitions go only to data directories that take them."""
    placement, slots = publisher.placement, catalog.slots
    slots.takes_writes = lambda number: host_view.takes_writes(placement.index_of(number))
    slots.is_drained = lambda number: host_view.is_drained(placement.index_of(number))


def _leases(
    context: ProcessContext,
    catalog: Catalog,
    publisher: MetadataPublisher,
    existing: Callable[[dict[str, Any]], Topic],
    answer_max: int,
) -> OffsetLeases[LaneSender]:
    def answer(to: Requester, code: ErrorCode, value: dict[str, Any]) -> None:
        publisher.answer(
            to.front, to.session, to.correlation_id, *encode_reply(code, value, answer_max)
        )

    return OffsetLeases(
        catalog.database, context.clock.monotonic_ns, existing,
        lambda row: publisher.to(Role.FLUSHER, publisher.placement.dir_index(row)),
        lambda out, slot, payload: out.put(LaneKind.LEASE, payload, slot=slot), publisher.table,
        answer,
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
