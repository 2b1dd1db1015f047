"""One scrape: the state of the processes, and what a front answers to the calls of Admin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from appliance.observe.metrics.families import Observed, families
from appliance.observe.metrics.groups import ObservedGroups, observe_groups
from appliance.observe.process_states import ProcessStates
from shm.memory.layout import ProcessWord, Role
from shm.tables.control import Control
from tailrace import __version__
from tailrace.admin.admin import Admin
from tailrace.core.errors import TailraceError
from tailrace.core.topic_partition import TopicPartition

logger = logging.getLogger("appliance.observe.http_server")

ASK_TIMEOUT_MS = 3_000
_NOTHING = Observed(
    [],
    __version__,
    True,
    {
        "cluster_id": "",
        "data_dirs": [],
        "memory": {"is_short": False},
        "backups": [],
        "bin": {"topics": 0, "bytes": 0, "oldest_deleted_us": None},
    },
    groups=ObservedGroups({}, [], 0, 0),
)


class StateCollector(Collector):
    """Collects the appliance's state anew for each scrape."""

    def __init__(self, states: ProcessStates, address: Callable[[], str], topics_max: int) -> None:
        """`address`: a front's; `topics_max`: topics with series of their own."""
        self._states = states
        self._topics_max = topics_max
        self._address = address

    def collect(self) -> Iterator[Metric]:
        return families(observe(self._states, self._address(), self._topics_max))

    def describe(self) -> Iterator[Metric]:
        """Every family, so that a scrape may ask for some by name (`/metrics?name[]=NAME`)."""
        return families(_NOTHING)


def observe(states: ProcessStates, address: str, topics_max: int) -> Observed:
    """Ask the processes' slots and a front. Blocking: some ASK_TIMEOUT_MS at most."""
    processes, occupancy = states.processes(), states.occupancy
    started = {process.name for process in processes}
    rings = {} if occupancy is None else occupancy.rings()
    lanes = {} if occupancy is None else occupancy.lanes()
    lanes = {name: lane for name, lane in lanes.items() if name in started}
    try:
        with Admin(
            address,
            client_id="tailrace-console",
            request_timeout_ms=ASK_TIMEOUT_MS,
            connect_timeout_ms=ASK_TIMEOUT_MS,
        ) as admin:
            partitions = {
                TopicPartition(topic, p): "latest"
                for topic, count in admin.partition_counts(internal=True).items()
                for p in range(count)
            }
            return Observed(
                processes,
                __version__,
                True,
                admin.describe_cluster(),
                list(admin.offsets(partitions).values()),
                topics_max,
                admin.describe_delays(),
                rings,
                lanes,
                states.cleaners(),
                _groups(states.control, admin),
                states.are_groups_refused(),
            )
    except TailraceError as error:
        logger.warning("front_does_not_answer reason=%r", str(error))
        return Observed(
            processes, __version__, rings=rings, lanes=lanes, cleaners=states.cleaners(),
            are_groups_refused=states.are_groups_refused(),
        )  # fmt: skip


def _groups(control: Control, admin: Admin) -> ObservedGroups | None:
    """Ask for groups only while their process runs, for a request would start it."""
    process = control.process(Role.GROUPS, 0)
    if not process.load(ProcessWord.GENERATION):
        return None
    try:
        return observe_groups(admin, process.load(ProcessWord.OFFSET_COMMITS))
    except TailraceError as error:
        logger.warning("groups_do_not_answer reason=%r", str(error))
        return None
