"""The controller: decides about topics and producers, and publishes the decisions.

Owner: the catalog (SQLite); in shared memory the lanes from it, and which process has its feed
(`appliance.control.publishing.metadata_publisher`). It waits on its doorbell: requests come from
the fronts over lanes (docs/adr/0001).
Invariants:
- A request is consumed before it is parsed. Any content is answered with a code and a sentence.
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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from appliance.catalog.catalog import Catalog, MissingDirectoryError, Topic
from appliance.catalog.recovery import (
    CatalogBusyError,
    CatalogUnusableError,
    live_slots,
    open_catalog,
)
from appliance.control.describe_cluster import ClusterDescription
from appliance.control.host_view import Host, HostView
from appliance.control.offset_leases import OffsetLeases
from appliance.control.partition_moves import PartitionMoves
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from appliance.control.placement.partition_placement import PartitionPlacement
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher, Sizes
from appliance.control.settings.config_commands import CONFIG_APIS, ConfigCommands
from appliance.control.topics.bin import BIN_APIS, TopicBin
from appliance.control.topics.change import Requester
from appliance.control.topics.change_queue import CHANGES, TopicChangeQueue
from appliance.control.topics.compaction_requests import CompactionRequests
from appliance.control.topics.defaults import TopicDefaults
from appliance.control.topics.topic_commands import TopicCommands, is_whole
from appliance.data.data_dir_lock import directory_id
from appliance.supervise.processes.restart_policy import ExitCode
from shm.crash_points import crash_point
from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.messages.lane_messages import AUDIT_REQUEST, REPLAY, LaneKind
from shm.queues.lane import LaneReader
from shm.runtime.agent_runner import ProcessContext, configure_logging, process_name, run, start
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import ProcessSlot
from shm.tables.settings_block import SettingsBlock
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, InvalidSettingError, TailraceError
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tailrace.protocol.frame import Api
from tailrace.protocol.messages import decode_json, encode_error, encode_reply

if TYPE_CHECKING:
    from appliance.control.audit_writer import AuditWriter
    from appliance.control.users.user_commands import UserCommands

logger = logging.getLogger(__name__)

USER_APIS = (Api.LIST_USERS, Api.ALTER_USERS, Api.LIST_ACLS, Api.ALTER_ACLS, Api.TEST_ACL)
PENDING_RETRY_NS = 50_000_000
IDS_RETRY_NS = 1_000_000_000
"""Interval of trying to record a block of producer ids."""
ANSWERS_MAX = 64
PRODUCER_ID_MAX = TRANSACTIONAL_PRODUCER_IDS - 1
"""Largest id whose epochs the controller gives. The transaction coordinator gives those above."""


class Controller:
    """An agent (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        topics: dict[str, Topic],
        publisher: MetadataPublisher,
        decisions: TopicCommands,
        description: ClusterDescription,
        slot: ProcessSlot,
        error_handler: CountedErrorHandler,
        incoming: dict[int, LaneReader],
        answer_max: int,
        leases: OffsetLeases[LaneSender],
        topic_bin: TopicBin,
        compaction: CompactionRequests,
        make_configs: Callable[[Callable[[Requester, ErrorCode, bytes], None]], ConfigCommands],
        topic_defaults: dict[str, Any],
        host_view: HostView,
        is_restarted: bool,
        ids_requested: AtomicCounter,
        wall_us: Callable[[], int],
        start_ns: int,
        audit: AuditWriter | None = None,
    ) -> None:
        """`ids_requested`: the word with the generation of the process of groups that needs
        transactional producer ids.
        """
        self._audit = audit
        self._catalog = catalog
        self._publisher = publisher
        self._decisions = decisions
        self._description = description
        self._slot = slot
        self._error_handler = error_handler
        self._incoming = incoming
        self._answer_max = answer_max
        self._now_ns = start_ns
        self._ids_requested = ids_requested
        self._wall_us = wall_us
        self._ids_given_to = 0
        """Generation of the process of groups with a block of producer ids."""
        self._give_ids_at_ns = start_ns
        for topic in topics.values():
            publisher.placement.assign(topic)
        publisher.connect_workers()
        publisher.feed_leases = lambda out: leases.feed(out, topics.values())
        publisher.kept_topics = topic_bin.kept
        publisher.feed_rights = self._feed_rights
        self._users: UserCommands | None = None
        """Made with the first request about users, or the first feed if there are any."""
        self._leases = leases
        self._bin = topic_bin
        self._compaction = compaction
        self._changes = TopicChangeQueue(
            catalog, topics, publisher, decisions, topic_bin, error_handler, answer_max, start_ns
        )
        self._moves = PartitionMoves(
            catalog, topics, publisher, self._changes, leases, host_view, start_ns
        )
        catalog.takes_writes = lambda number: host_view.takes_writes(
            publisher.placement.index_of(number)
        )
        decisions.begin_move = self._moves.begin
        description.moves = self._moves.described
        self._host_view = host_view
        self._configs = make_configs(self._send)
        self._topic_defaults = TopicDefaults(
            catalog, topics, publisher, self._changes, topic_defaults, is_restarted=is_restarted
        )

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self._topic_defaults.change(dict(settings["topic_defaults"]))
        self._host_view.use_settings(settings)
        self._decisions.deletions_kept_ms = int(settings["topic.delete.retention.ms"])
        self._decisions.quotas = settings["quotas"]

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """Run one step of the loop: feeds, requests, finished decisions, one commit for all,
        waiting messages.
        """
        self._now_ns = now_ns
        work = self._publisher.connect_workers() + self._publisher.connect_groups()
        if self._configs.are_in_force():
            work += self._publisher.feed(pause_readers=self._changes.is_inheriting(now_ns))
        self._catalog.begin_step()
        work += self._bin.finish(now_ns)
        work += self._topic_defaults.step(now_ns)
        work += self._give_producer_ids()
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
                    self._handle(requester, api, payload)
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
        """The timeout: short while a message waits for another process; None: wait for the
        doorbell. The process that frees the lane or changes the table rings, but look again in
        any case.
        """
        if self._now_ns < self._give_ids_at_ns:
            return min(self._give_ids_at_ns, self._now_ns + PENDING_RETRY_NS)
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

    # ---- requests --------------------------------------------------------------------------------

    def _handle(self, requester: Requester, api: int, payload: bytes) -> None:
        """Handle one request. Any content is answered with a code and a sentence."""
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
            answer = self._answer(requester, api, decode_json(payload))
            if answer is None:
                return
            code, body = encode_reply(ErrorCode.OK, answer, self._answer_max)
        except TailraceError as error:
            code, body = error.code, encode_error(error.detail)
        except Exception as error:  # the boundary of one request
            code, body = (
                ErrorCode.INTERNAL_ERROR,
                encode_error(
                    self._error_handler.on_error(f"api={api} session={requester.session}", error)
                ),
            )
        self._send(requester, code, body)

    def _answer(
        self, requester: Requester, api: int, request: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The response; None if it follows later. Raises TailraceError."""
        if api in BIN_APIS:
            return self._bin.take(requester, api, request, self._now_ns, self._answer_max)
        if api in CONFIG_APIS:
            return self._configs.take(requester, api, request, self._now_ns)
        if api == Api.DESCRIBE_SCHEMAS:
            return self._decisions.describe_schemas(request)
        if api == Api.COMPACT_TOPIC:
            return self._compaction.take(request)
        if api == AUDIT_REQUEST and self._audit is not None:
            return self._audit.write(request)
        if api == Api.DESCRIBE_CLUSTER:
            return self._description.describe(request)
        if api in USER_APIS:
            return self._user_commands().take(
                api, request,
                lambda answer: self._send(
                    requester, *encode_reply(ErrorCode.OK, answer, self._answer_max)
                ),
                lambda error: self._send(requester, error.code, encode_error(error.detail)),
            )  # fmt: skip
        raise TailraceError(f"API {api} is not served by the controller", ErrorCode.UNKNOWN_API)

    def _user_commands(self) -> UserCommands:
        if self._users is None:
            # Few appliances have users.
            from appliance.control.users.user_commands import UserCommands

            self._users = UserCommands(self._catalog, self._publisher.publish_rights, self._wall_us)
        return self._users

    def ensure_administrator(self, data_dir: str, addresses: Sequence[str]) -> None:
        """Make the first user, an administrator, if there are no users."""
        from shm.rights.server_keys import address_for_keys  # few appliances have users

        self._user_commands().ensure_administrator(data_dir, address_for_keys(addresses))

    def _feed_rights(self, out: LaneSender) -> None:
        begins = REPLAY
        if self._users is not None or self._catalog.has_users():
            verifies = self._publisher.verifies_passwords(out)
            for message in self._user_commands().feed(with_credentials=verifies):
                out.put(LaneKind.RIGHTS, message, flags=begins)
                begins = 0

    def _init_producer(self, requester: Requester, request: dict[str, Any]) -> None:
        """Give a producer id, or its next epoch; the answer follows the commit.

        Raises: TailraceError.
        """
        producer_id, epoch = request.get("producer_id"), request.get("producer_epoch", 0)
        if producer_id is None:
            producer_id, epoch = self._catalog.new_producer()
        elif is_whole(producer_id, 0, TRANSACTIONAL_PRODUCER_IDS - 1) and is_whole(
            epoch, -1, 32767
        ):
            producer_id, epoch = self._catalog.next_epoch(producer_id, epoch)
        else:
            raise InvalidRequestError("producer_id and producer_epoch must be whole numbers")
        body = orjson.dumps({"producer_id": producer_id, "producer_epoch": epoch})

        def kept() -> None:
            crash_point("controller.after_producer_id")
            self._send(requester, ErrorCode.OK, body)

        self._catalog.afterwards(
            kept, lambda error: self._send(requester, error.code, encode_error(error.detail))
        )

    def _give_producer_ids(self) -> int:
        """Give the process of groups a block of transactional producer ids, once for each of its
        generations that asks; the message follows the commit.
        """
        generation = self._ids_requested.load()
        if (
            generation == self._ids_given_to
            or not self._publisher.knows_groups
            or self._now_ns < self._give_ids_at_ns
        ):
            return 0
        self._ids_given_to = generation

        def kept() -> None:
            crash_point("controller.after_producer_id")
            self._publisher.to(Role.GROUPS, 0).put(
                LaneKind.PRODUCER_IDS, session=generation, correlation_id=first
            )

        def failed(error: TailraceError) -> None:
            logger.warning("no_producer_ids generation=%d error=%r", generation, error.detail)
            self._ids_given_to = 0
            self._give_ids_at_ns = self._now_ns + IDS_RETRY_NS

        try:
            first = self._catalog.new_transactional_block(self._wall_us())
        except TailraceError as error:
            failed(error)
        else:
            self._catalog.afterwards(kept, failed)
        return 1

    def _send(self, requester: Requester, code: ErrorCode, body: bytes) -> None:
        self._publisher.answer(
            requester.front, requester.session, requester.correlation_id, code, body
        )


def build(
    context: ProcessContext, catalog: Catalog, dir_numbers: list[int], machine: Host
) -> Controller:
    """Make the controller of this specification. `dir_numbers`: the catalog's number of each data
    directory.
    """
    spec, settings, control = context.spec, context.spec.settings, context.control
    worker_dirs, front_count = list(settings["worker_dirs"]), int(settings["fronts"])
    roles = [(Role.FRONT, f) for f in range(front_count)]
    roles += [(Role.WORKER, w) for w in range(len(worker_dirs))]
    roles += [(Role.FLUSHER, d) for d in range(len(spec.data_dirs))]

    def connect(role: Role, index: int) -> LaneSender:
        name = process_name(role, index)
        return LaneSender(
            role,
            index,
            context.lane_writer(name),
            context.bell(role, index),
            control.process(role, index),
        )

    def connect_groups() -> LaneSender | None:
        return (
            connect(Role.GROUPS, 0)
            if control.process(Role.GROUPS, 0).load(ProcessWord.GENERATION)
            else None
        )

    def request_scheduler() -> None:
        if not context.slot.load(ProcessWord.SCHEDULER_REQUESTED):
            context.slot.store(ProcessWord.SCHEDULER_REQUESTED, 1)
            context.bell(Role.SUPERVISOR, 0).ring()

    tables = [context.table(d) for d in range(len(spec.data_dirs))]
    topics = {topic.name: topic for topic in catalog.topics()}
    dedicated = DedicatedWorkers(
        {w: control.process(Role.WORKER, w) for w in settings["spare_workers"]}, len(spec.data_dirs)
    )
    placement = PartitionPlacement(
        topics, dir_numbers, worker_dirs, dedicated, context.bell(Role.SUPERVISOR, 0)
    )
    # clients of the SDK are told a front for each partition: none is a gateway
    direct = front_count - int(settings.get("gateways", 0))
    sizes = Sizes(direct, int(settings["ring_bytes"]), int(settings["lane_bytes"]))
    outgoing = [connect(role, index) for role, index in [*roles, (Role.SCHEDULER, 0)]]
    topic_defaults = dict(settings["topic_defaults"])
    answer_max = min(out.lane.payload_max for out in outgoing if out.role is Role.FRONT)
    publisher = MetadataPublisher(
        topics,
        outgoing,
        tables,
        placement,
        dedicated,
        lambda worker: connect(Role.WORKER, worker),
        connect_groups,
        request_scheduler,
        sizes,
        topic_defaults,
    )
    leases: OffsetLeases[LaneSender] = OffsetLeases(
        catalog.database, context.clock.monotonic_ns, lambda item: decisions.existing(item),
        lambda row: publisher.to(Role.FLUSHER, placement.dir_index(row)),
        lambda out, slot, payload: out.put(LaneKind.LEASE, payload, slot=slot), publisher.table,
        lambda to, code,
        value: publisher.answer(to.front, to.session, to.correlation_id,
        *encode_reply(code, value, answer_max)),
    )  # fmt: skip
    host_view = HostView(
        machine,
        control,
        spec.data_dirs,
        roles,
        dedicated,
        reserve_bytes=int(settings["reserve_bytes"]),
        http_listen=settings["http.listen"],
    )
    host_view.use_settings(spec.settings)
    topic_bin = TopicBin(
        catalog, host_view, lambda row: placement.known_dir_index(row),
        lambda index, topic_id: publisher.to(Role.FLUSHER, index).put(LaneKind.PURGE, topic_id),
        publisher.publish_purged, leases.elapsed_ms, leases.keep_time, context.clock.wall_us,
    )  # fmt: skip
    decisions = TopicCommands(
        catalog, topics, dedicated, lambda row: publisher.table(row).read(row.slot),
        context.clock.wall_us, topic_bin=topic_bin, ring_bytes=sizes.ring_bytes,
        lane_bytes=sizes.lane_bytes, topic_defaults=publisher.topic_defaults,
    )  # fmt: skip
    decisions.deletions_kept_ms = int(settings["topic.delete.retention.ms"])
    decisions.quotas = settings["quotas"]

    compaction = CompactionRequests(
        decisions.existing, lambda row: publisher.table(row).read(row.slot),
        lambda row, payload: publisher.to(Role.FLUSHER, placement.dir_index(row)).put(
            LaneKind.COMPACT, payload
        ),
        context.clock.monotonic_ns, publisher.topic_defaults,
    )  # fmt: skip

    def make_configs(send: Callable[[Requester, ErrorCode, bytes], None]) -> ConfigCommands:
        in_force, overrides = (
            SettingsBlock(context.attach(name, RegionKind.SETTINGS))
            for name in ("settings", "overrides")
        )
        bell = context.bell(Role.SUPERVISOR, 0)
        return ConfigCommands(catalog, in_force, overrides, control, bell, send, answer_max)

    controller = Controller(
        catalog=catalog, topics=topics, publisher=publisher, decisions=decisions, leases=leases,
        topic_bin=topic_bin, compaction=compaction,
        make_configs=make_configs, topic_defaults=dict(topic_defaults), host_view=host_view,
        is_restarted=spec.generation > 1,
        description=ClusterDescription(
            topics, publisher, host_view, topic_bin, spec.instance, answer_max
        ),
        slot=context.slot, error_handler=CountedErrorHandler(context.slot),
        incoming={f: context.lane_reader(process_name(Role.FRONT, f)) for f in range(front_count)},
        ids_requested=control.process(Role.GROUPS, 0).cell(ProcessWord.TRANSACTIONS_REQUESTED),
        wall_us=context.clock.wall_us, answer_max=answer_max, start_ns=context.clock.monotonic_ns(),
        audit=_audit_writer(context),
    )  # fmt: skip
    if settings.get("security"):
        controller.ensure_administrator(spec.data_dirs[0], settings["listen"])
    context.report_ready()
    for front in range(front_count):  # they compare the controller's generation
        context.bell(Role.FRONT, front).ring()
    return controller


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
