"""Process of groups: builds its agent (`appliance.groups.agent.agent`) with the service over the
database, and runs it.

Owner: see the agent.
Crash: the agent's.

Run as `python -P -m appliance.groups.process`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.groups.agent.agent import GroupsAgent
from appliance.groups.agent.front_link import FrontLink
from appliance.groups.agent.service import GroupService
from appliance.groups.agent.transaction import Opened
from appliance.groups.agent.transaction_lanes import TransactionLanes
from appliance.groups.agent.worker_link import WorkerLanes, WorkerLink, WorkerLinks
from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import GroupLimits, TransactionLimits
from appliance.groups.base.topic_image import CatalogTopicImage
from appliance.groups.share.share_service import ShareService
from appliance.groups.store.group_store import GroupStore
from appliance.groups.transactions.coordinator import TransactionCoordinator
from shm.memory.layout import Phase, ProcessWord, Role
from shm.runtime.agent_runner import ProcessContext, configure_logging, process_name, run, start
from shm.runtime.error_handler import CountedErrorHandler
from tailrace.format.directory.data_dir import GROUPS_FILE


def build(context: ProcessContext, open_store: Callable[[str], GroupStore]) -> GroupsAgent:
    """Build the agent of a process, and ask the controller for the catalog. `open_store`: opens the
    database at a path.
    """
    spec, settings = context.spec, context.spec.settings
    fronts = [_front_link(context, front) for front in range(int(settings["fronts"]))]
    limits, transaction_limits = GroupLimits(), TransactionLimits()

    def take_limits(values: Mapping[str, Any]) -> None:
        limits.take(values)
        transaction_limits.take(values)

    take_limits(settings)
    answer_max = min(front.answers.payload_max for front in fronts)
    errors = CountedErrorHandler(context.slot)
    lanes = TransactionLanes(_worker_links(context), spec.generation, errors)

    def open_service(topics: CatalogTopicImage, now_ns: int) -> Opened:
        store = open_store(f"{spec.data_dirs[0]}/{GROUPS_FILE}")
        try:
            share = ShareService(store, topics, limits, answer_max, now_ns, context.clock.wall_us)
            service = GroupService(
                store, topics, limits, answer_max, now_ns, context.clock.wall_us, share=share,
                assignors=Assignors(settings["group.assignors"]),
                transactions=lambda offsets, times: TransactionCoordinator(
                    store, offsets, lanes.links, lanes.numbers, transaction_limits, answer_max,
                    now_ns, times, context.clock.monotonic_ns
                ),
            )  # fmt: skip
            assert service.transactions is not None
            lanes.serve(service.transactions)
            return store, service
        except BaseException:
            store.close()
            raise

    agent = GroupsAgent(
        open_service=open_service,
        topics=CatalogTopicImage([context.table(d) for d in range(len(spec.data_dirs))]),
        from_controller=context.lane_reader(process_name(Role.CONTROLLER, 0)),
        fronts=fronts,
        generation=spec.generation,
        slot=context.slot,
        error_handler=errors,
        is_running=lambda: context.control.phase is not Phase.RECOVERING,
        on_ready=context.report_ready,
        monotonic_ns=context.clock.monotonic_ns,
        start_ns=context.clock.monotonic_ns(),
        transactions=lanes,
        take_limits=take_limits,
    )
    context.ask_for_feed()
    for front in range(len(fronts)):  # requests that wait for this process can be sent now
        context.bell(Role.FRONT, front).ring()
    return agent


def _front_link(context: ProcessContext, front: int) -> FrontLink:
    name, process = process_name(Role.FRONT, front), context.control.process(Role.FRONT, front)
    return FrontLink(
        front, context.lane_reader(name), context.lane_writer(name),
        context.bell(Role.FRONT, front), lambda: process.load(ProcessWord.READY_GENERATION)
    )  # fmt: skip


def _worker_links(context: ProcessContext) -> WorkerLinks:
    """The workers, also those that may be started later. Their lanes are attached when they
    exist.
    """
    settings = context.spec.settings

    def link(index: int, *, is_dedicated: bool) -> WorkerLink:
        name = process_name(Role.WORKER, index)

        def connect() -> WorkerLanes:
            return WorkerLanes(context.lane_writer(name), context.lane_reader(name))

        return WorkerLink(
            index, context.control.process(Role.WORKER, index), context.bell(Role.WORKER, index),
            connect, is_dedicated=is_dedicated,
        )  # fmt: skip

    def request() -> None:
        context.slot.store(ProcessWord.TRANSACTIONS_REQUESTED, context.spec.generation)
        context.bell(Role.SUPERVISOR, 0).ring()
        context.bell(Role.CONTROLLER, 0).ring()

    workers = [link(index, is_dedicated=False) for index in range(int(settings["workers"]))]
    spares = [link(index, is_dedicated=True) for index in settings["spare_workers"]]
    return WorkerLinks([*workers, *spares], request, context.slot.show_decisions)


def main() -> None:
    """Run the process."""
    context = start()
    configure_logging(context)
    agent = build(context, GroupStore)
    run(agent, context, apply=agent.apply_settings)
    agent.close()


if __name__ == "__main__":
    main()
