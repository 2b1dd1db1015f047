"""Both ends of the lanes between the transaction coordinator and workers."""

from __future__ import annotations

from appliance.groups.agent.worker_link import WorkerLanes, WorkerLink, WorkerLinks
from shm.memory.layout import ControlLayout, LaneLayout, ProcessWord, RegionKind, Role
from shm.memory.region import Region
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneReader, LaneWriter
from shm.tables.control import Control
from tests.kit.memory import simulated
from tests.kit.stepped.fronts import SilentBell

LANE_BYTES = 1 << 13


class Lanes:
    """Workers with both ends of their lanes; the second one is dedicated."""

    def __init__(self) -> None:
        def lane() -> Region:
            return simulated(RegionKind.LANE, LaneLayout(LANE_BYTES).size, LANE_BYTES)

        control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.slots = [control.process(Role.WORKER, index) for index in range(2)]
        to_it, from_it = [lane() for _ in range(2)], [lane() for _ in range(2)]
        self.readers = [LaneReader(region) for region in to_it]
        self.writers = [LaneWriter(region) for region in from_it]
        self.requests = 0
        self.shown: list[tuple[int, int]] = []
        self.links = WorkerLinks(
            [
                WorkerLink(
                    index, self.slots[index], SilentBell(),
                    lambda index=index: WorkerLanes(  # type: ignore[misc]
                        LaneWriter(to_it[index]), LaneReader(from_it[index])
                    ),
                    is_dedicated=index == 1,
                )
                for index in range(2)
            ],
            self._request,
            lambda decided, carried_out: self.shown.append((decided, carried_out)),
        )  # fmt: skip
        self.start(0, 1)

    def _request(self) -> None:
        self.requests += 1

    def start(self, index: int, generation: int) -> None:
        self.slots[index].store(ProcessWord.GENERATION, generation)
        self.slots[index].store(ProcessWord.LIVE, 1)
        self.slots[index].store(ProcessWord.TRANSACTION_LANES, 1)

    def read(self, index: int = 0) -> list[tuple[LaneKind, int, bytes]]:
        lane, found = self.readers[index], []
        while (message := lane.peek()) is not None:
            kind = LaneKind(message.kind)
            found.append((kind, message.correlation_id, bytes(message.payload)))
            lane.advance(message)
            lane.consume()
        return found

    def say(
        self, kind: LaneKind, index: int = 0, generation: int = 0, payload: bytes = b""
    ) -> None:
        assert self.writers[index].try_write(kind, 0, 0, 0, generation, 0, (payload,))
        self.writers[index].commit()
