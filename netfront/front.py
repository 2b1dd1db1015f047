"""Front process: builds its agent (`netfront.agent.front_agent`) from shared memory, and runs it.

Owner: one address's ZeroMQ socket.

Crash: the supervisor starts another process, which keeps the port (see the agent).

Run it with `python -P -m netfront.front`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from netfront.agent.front_agent import Front, Links
from netfront.fetch.log.file_reader import DiskFileReader, FileReader
from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.reader_pool import AsyncReader, ReaderPool
from netfront.forward.forwarder import ForwarderLink, OnDemand
from netfront.limits import (
    credit_budget,
    limits,
    message_max_bytes,
    open_descriptor_count,
    open_files_max,
)
from netfront.partition_routes import PartitionRoutes
from netfront.produce.ring_acks import AckWalker
from netfront.produce.worker_link import WorkerLink
from netfront.socket.flow_control import CreditLedger
from netfront.socket.listening_socket import AddressInUseError, ListeningSockets, SocketAccess
from netfront.socket.peers.socket_stats import keep_freed_memory
from netfront.socket.router import Router, Security
from netfront.socket.transport import Transport
from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.queues.ring import Ring
from shm.runtime.agent_runner import (
    EXIT_ADDRESS_IN_USE,
    ProcessContext,
    configure_logging,
    process_name,
    run,
    start,
)
from tailrace.protocol.listeners import front_address

if TYPE_CHECKING:
    from netfront.access.gate import Gate


EXIT_FAILED = 1


def build(
    context: ProcessContext,
    transport: Transport,
    files: FileReader,
    pool: AsyncReader,
    generation: int,
    gate: Gate | None = None,
) -> Front:
    """Build the front of this process and request its feed from the controller.

    `generation` is a number that no earlier front of this address had.
    """
    spec, settings = context.spec, context.spec.settings
    lane_half = int(settings["lane_bytes"]) // 2
    reader = LogReader(
        files,
        spec.data_dirs,
        [context.table(d) for d in range(len(spec.data_dirs))],
        open_files_max(),
    )
    front = Front(
        transport=transport,
        generation=generation,
        process_generation=spec.generation,
        links=_links(context, generation),
        routing=PartitionRoutes(),
        gate=gate,
        reader=reader,
        close_unused=reader.files.close_unused,
        pool=pool,
        ledger=CreditLedger(credit_budget(settings), 4 * lane_half, lane_half),
        slot=context.slot,
        cluster_id=spec.instance,
        auto_create_topics=bool(settings["auto_create_topics"]),
        fronts=int(settings["fronts"]),
        quotas=settings["quotas"],
        audit=settings.get("audit"),
        on_ready=context.report_ready,
        start_ns=context.clock.monotonic_ns(),
        clock=context.clock,
    )
    context.ask_for_feed()
    return front


def _links(context: ProcessContext, generation: int) -> Links:
    """Attach the rings and lanes of the processes that run, and those that may be started."""
    settings = context.spec.settings

    def connect(worker: int) -> WorkerLink:
        ring = Ring(context.attach(f"ring-{worker}", RegionKind.RING))
        lane = context.lane_writer(process_name(Role.WORKER, worker))
        return WorkerLink(
            lane,
            context.bell(Role.WORKER, worker),
            ring,
            AckWalker(ring, context.spec.index, generation),
        )

    controller = _forwarder(context, Role.CONTROLLER)
    return Links(
        workers={w: connect(w) for w in range(int(settings["workers"]))},
        connect_worker=connect,
        controller=controller,
        scheduler=_scheduler(context, controller.to_it.payload_max),
        groups=_groups(context, controller.to_it.payload_max),
        front_ports=lambda: [
            context.control.port(f).load()
            for f in range(int(settings["fronts"]) - int(settings.get("gateways", 0)))
        ],
        decisions=context.control.process(Role.GROUPS, 0).decisions,
    )


def _forwarder(context: ProcessContext, role: Role) -> ForwarderLink:
    """Lanes to and from a process that answers forwarded requests."""
    name, process = process_name(role, 0), context.control.process(role, 0)
    return ForwarderLink(
        context.lane_writer(name),
        context.lane_reader(name),
        context.bell(role, 0),
        lambda: process.load(ProcessWord.GENERATION),
    )


def _scheduler(context: ProcessContext, payload_max: int) -> OnDemand:
    """The scheduler, which the supervisor starts when it is asked for."""
    controller_slot = context.control.process(Role.CONTROLLER, 0)
    return OnDemand(
        _connector(context, Role.SCHEDULER),
        _requester(context, ProcessWord.SCHEDULER_REQUESTED),
        lambda: False,
        payload_max,
        lambda: bool(controller_slot.load(ProcessWord.SCHEDULER_REQUESTED)),
    )


def _groups(context: ProcessContext, payload_max: int) -> OnDemand:
    """The group coordinator, which the supervisor starts when it is asked for."""
    groups = context.control.process(Role.GROUPS, 0)
    return OnDemand(
        _connector(context, Role.GROUPS),
        _requester(context, ProcessWord.GROUPS_REQUESTED),
        lambda: bool(groups.load(ProcessWord.WITHOUT_MEMORY)),
        payload_max,
    )


def _connector(context: ProcessContext, role: Role) -> Callable[[], ForwarderLink | None]:
    """A function that returns the lanes of a process, None until it has been started."""
    process = context.control.process(role, 0)
    return lambda: _forwarder(context, role) if process.load(ProcessWord.GENERATION) else None


def _requester(context: ProcessContext, word: ProcessWord) -> Callable[[], None]:
    """A function that asks the supervisor once to start a process."""

    def request() -> None:
        if not context.slot.load(word):
            context.slot.store(word, 1)
            context.bell(Role.SUPERVISOR, 0).ring()

    return request


def make_gate(context: ProcessContext) -> tuple[str, Gate]:
    """The secret key and the gate of an appliance that has users. The process ends without its
    keys.
    """
    from netfront.access.gate import Gate
    from netfront.access.page_tokens import PageTokens
    from shm.rights.server_keys import (
        AnnouncedKeys,
        KeysUnusableError,
        own_public_key,
        read_server_key,
    )

    data_dir = context.spec.data_dirs[0]
    try:
        gate = Gate(own_public_key(data_dir), context.clock.wall_us)
        public, secret = read_server_key(data_dir)
        gate.server_keys = AnnouncedKeys(data_dir, public)
        gate.tokens = PageTokens(secret.encode())
        return secret, gate
    except KeysUnusableError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED)


def main() -> None:
    """Run the front process."""
    context = start()
    configure_logging(context)
    keep_freed_memory()
    spec = context.spec
    # A predecessor that listened on any free port has announced its port to clients. Keep it.
    port = context.control.port(spec.index).load()
    addresses = [front_address(address, spec.index, port) for address in spec.settings["listen"]]
    security, gate = None, None
    if spec.settings.get("security"):
        secret, gate = make_gate(context)
        security = Security(secret, gate.allows)
    given = ListeningSockets(
        SocketAccess(*spec.settings["ipc.access"]), spec.settings["listen.sockets"]
    )
    own_descriptors = open_descriptor_count()
    try:
        router = Router(
            addresses,
            message_max_bytes(spec.settings),
            limits(spec.settings, own_descriptors),
            given,
            security=security,
        )
    except AddressInUseError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_ADDRESS_IN_USE)
    context.control.port(spec.index).store(router.port)
    generation = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF | 1
    if gate is not None:
        assert router.zap is not None
        gate.answer_connections = router.zap.step
    front = build(
        context, router, DiskFileReader(), ReaderPool(context.doorbell.ring), generation, gate
    )

    router.on_rebound = front.end_session_of

    def wait(timeout_ms: float | None, busy_ns: int) -> None:
        if front.accepts_input:
            router.wait(context.doorbell, timeout_ms, busy_ns)
        else:
            context.doorbell.wait(timeout_ms)

    def apply(settings: dict[str, Any]) -> None:
        front.apply_settings(settings)
        router.set_limits(limits(settings, own_descriptors))

    run(front, context, wait, apply)
    router.close()


if __name__ == "__main__":
    main()
