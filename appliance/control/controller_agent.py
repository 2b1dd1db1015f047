"""Controller: the agent of the controller process. It steps the parts that decide.

Owner: the loop; each part owns its state. The lanes from the fronts.
Invariants:
- A request is consumed before it is parsed (`request_handler`).
- A step commits once for all its requests. A decision is on the disk before it is published.
- A client is answered when the flusher has carried the decision out (its slot in the partition
  table shows the version).
Bounds:
- ANSWERS_MAX pending answers of a front; its requests are not read beyond that.
- See `appliance.control.topics.change_queue` for the rest.
Crash: decisions in state `changing` or `deleting` are published again at start, which is
idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from appliance.catalog.catalog import Catalog
from appliance.control.host_view import HostView
from appliance.control.moves.partition_moves import PartitionMoves
from appliance.control.offset_leases import OffsetLeases
from appliance.control.producer_ids import ProducerIds
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.request_fields import Requester
from appliance.control.request_handler import RequestHandler
from appliance.control.settings.config_commands import ConfigCommands
from appliance.control.topics.bin import TopicBin
from appliance.control.topics.change_queue import TopicChangeQueue
from appliance.control.topics.defaults import TopicDefaults
from appliance.control.topics.topic_commands import TopicCommands
from shm.memory.layout import ProcessWord, Role
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneReader
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode

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
