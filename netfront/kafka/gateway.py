"""Kafka gateway: a front that speaks Kafka's protocol, in a process of its own (`tr-kafka-N`).

It is started by `kafka.listen` and loaded by nothing else. Inside it runs an ordinary front
(`netfront.agent.front_agent.Front`), whose clients are the Kafka connections
(`netfront.kafka.exchange.peers`). So a record of a Kafka client goes the way of every record: lane,
worker, ring, flusher; and is read from segments by the same code.

- `Listener`: sockets, frames, the order of responses.
- `Dispatcher`: the handler of each request.
- `netfront.kafka.apis`: Kafka's APIs as requests to the front.

Owner: its sockets. In shared memory it is the front behind the last one of `fronts`, with lanes and
cursors of its own.

Invariants:
- No input ends the process. It is answered with Kafka's error, or its connection is closed.
- Its end disturbs no other process, and no client but its own.

Crash: its connections close. Kafka's clients connect again, and send again what was not
acknowledged; workers recognise repeated batches of idempotent producers.

Run it with `python -P -m netfront.kafka.gateway`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from netfront.agent.front_agent import Front
from netfront.fetch.log.file_reader import DiskFileReader
from netfront.fetch.reader_pool import ReaderPool
from netfront.front import build, make_gate
from netfront.kafka.apis.call import Services
from netfront.kafka.dispatch import Dispatcher
from netfront.kafka.exchange.peers import PeerTransport
from netfront.kafka.network.connector import Connector
from netfront.kafka.network.listener import CannotListenError, Listener, listening_sockets
from netfront.limits import limits, open_descriptor_count
from shm.memory.layout import ProcessWord
from shm.rights.kafka_tls import TlsError
from shm.runtime.agent_runner import (
    EXIT_ADDRESS_IN_USE,
    ProcessContext,
    log_to_stderr,
    run,
    set_comm_name,
    start,
)
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.logs.slow_operations import SLOW
from shm.runtime.timing_wheel import NEVER_NS, TimingWheel
from shm.tables.control import ProcessSlot

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.kafka.login.login import Logins

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 74
"""As `appliance.supervise.processes.restart_policy` has it."""


class Gateway:
    """Agent of the gateway's process (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        front: Front,
        transport: PeerTransport,
        dispatcher: Dispatcher,
        listener: Listener,
        services: Services,
        slot: ProcessSlot,
        connector: Connector,
    ) -> None:
        self._connector = connector
        self._front = front
        self._transport = transport
        self._dispatcher = dispatcher
        self._listener = listener
        self._services = services
        self._slot = slot
        self._refused_count = 0
        self._connection_count = -1

    def step(self, now_ns: int) -> int:
        """Run one step of the loop. Return the amount of work done."""
        self._services.now_ns = now_ns
        if self._front.accepts_input and not self._listener.is_accepting:
            self._listener.accept_connections()
        work = self._listener.step(now_ns)
        if self._services.logins is not None:
            work += self._services.logins.checks.step()
        work += self._dispatcher.step()
        work += self._front.step(now_ns)
        for callback in self._services.timers.advance(now_ns):
            work += 1
            try:
                callback()
            except Exception as error:
                self._dispatcher.on_error("kafka_timer", error)
        work += self._dispatcher.step()
        work += self._listener.flush()
        self._count_connections()
        return work

    def _count_connections(self) -> None:
        connections = len(self._listener)
        if connections != self._connection_count:
            self._connection_count = connections
            self._slot.kafka.set_connections(connections)
        count = self._listener.refused_count
        if count != self._refused_count:
            before = self._slot.load(ProcessWord.REFUSED_COUNT)
            self._slot.store(ProcessWord.REFUSED_COUNT, before + count - self._refused_count)
            self._refused_count = count

    def has_more(self) -> bool:
        """True if the next step has work to do at once."""
        return (
            bool(self._transport.requests)
            or bool(self._dispatcher.waiting)
            or self._front.has_more()
        )

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next step that is due without a message, or None."""
        deadlines = [
            self._front.next_deadline_ns(),
            self._listener.next_sweep_ns,
            self._services.timers.quiet_until_ns,
        ]
        deadline_ns = min(at for at in deadlines if at is not None)
        return deadline_ns if deadline_ns < NEVER_NS else None

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self._services.settings.update(settings)
        self._connector.apply_settings(settings)
        self._front.apply_settings(settings)

    def begin_stop(self) -> None:
        """Stop accepting. What was read is still served."""
        self._listener.stop()
        self._front.begin_stop()

    def is_finished(self) -> bool:
        """True if every request that was passed on is answered."""
        return self._front.is_finished()

    def close(self) -> None:
        """Close every connection."""
        self._listener.flush()
        self._listener.close_all()


def build_gateway(
    context: ProcessContext,
    settings: dict[str, Any],
    listener_of: Any,
    connector: Connector,
    gate: Gate | None = None,
) -> Gateway:
    """Wire the gateway of this process. `settings` are those that all parts of it use; a change
    of them is put there. `listener_of(dispatcher)` makes its listener. `gate` has the users, where
    clients must log in.
    """
    transport = PeerTransport()
    generation = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF | 1
    front = build(
        context, transport, DiskFileReader(), ReaderPool(context.doorbell.ring), generation, gate
    )
    now_ns = context.clock.monotonic_ns()
    services = Services(
        front=front,
        routes=front.routes,
        timers=TimingWheel(now_ns),
        cluster_id=context.spec.instance,
        data_dirs=list(context.spec.data_dirs),
        settings=settings,
        monotonic_ns=context.clock.monotonic_ns,
        wall_us=context.clock.wall_us,
        now_ns=now_ns,
        gate=gate,
        logins=connector.logins,
    )
    dispatcher = Dispatcher(
        services,
        transport,
        CountedErrorHandler(context.slot),
        context.slot.kafka,
    )
    listener = listener_of(dispatcher)
    dispatcher.listener = listener
    services.go_on = dispatcher.waiting.append
    services.let_in = listener.let_in
    if connector.logins is not None:
        connector.logins.on_failed = front.note_failed_login
    claim = None
    if gate is not None:
        from netfront.access.rules import OF_A_GATEWAY
        from netfront.kafka.rights.table import allowed

        gate.fulfilled = (OF_A_GATEWAY,)
        dispatcher.allowed = allowed
        claim = gate.own_claim
    services.own_peer = transport.open("kafka-gateway", claim)
    connector.on_secure = dispatcher.on_secure
    transport.unsent_of_all = listener.unsent_bytes
    return Gateway(front, transport, dispatcher, listener, services, context.slot, connector)


def gateway_number(context: ProcessContext) -> int:
    """The number of this gateway, from 0: fronts come before gateways."""
    settings = context.spec.settings
    return context.index - (int(settings["fronts"]) - int(settings["gateways"]))


def _make_logins(
    context: ProcessContext, gate: Gate, secret: str, settings: dict[str, Any]
) -> Logins:
    from netfront.kafka.login.login import Logins
    from netfront.kafka.login.password_checks import PasswordChecks
    from netfront.kafka.login.token_checks import TokenChecks
    from shm.rights.bearer_tokens import TokenKeysError

    try:
        tokens = TokenChecks(settings, context.clock.wall_us)
    except TokenKeysError as error:
        _end(context, error)
    checks = PasswordChecks(context.doorbell.ring)
    return Logins(gate, checks, secret.encode(), settings, tokens=tokens)


def _end(context: ProcessContext, error: Exception) -> NoReturn:
    """End for files that cannot be used. At its first start the appliance ends at once; a successor
    tries again.
    """
    print(f"tailrace: {error}", file=sys.stderr, flush=True)
    sys.exit(EXIT_CONFIG if context.spec.generation == 1 else EXIT_FAILED)


def main() -> None:
    """Run the gateway."""
    context = start()
    name = f"tr-kafka-{gateway_number(context)}"
    set_comm_name(name)
    settings = dict(context.spec.settings)
    log_to_stderr(name, settings.get("log_level", "info"), settings.get("log_format", "text"))
    SLOW.set_limit(settings.get("slow_operation_ms", 0))
    port = context.control.port(context.index)
    own_descriptors = open_descriptor_count()
    secret, gate = make_gate(context) if settings.get("security") else ("", None)
    logins = None if gate is None else _make_logins(context, gate, secret, settings)
    try:
        connector = Connector(settings, logins)
        addresses = [each.address for each in connector.listeners]
        sockets = listening_sockets(addresses, port.load())
    except CannotListenError as error:
        print(f"tailrace: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(EXIT_ADDRESS_IN_USE)
    except TlsError as error:
        _end(context, error)
    connections_max = limits(settings, own_descriptors).connections_max
    made: list[Listener] = []

    def listener_of(dispatcher: Dispatcher) -> Listener:
        made.append(
            Listener(
                sockets, connections_max, dispatcher.on_frames, dispatcher.on_closed,
                dispatcher.on_error, connector.connect,
            )
        )  # fmt: skip
        return made[0]

    gateway = build_gateway(context, settings, listener_of, connector, gate)
    listener = made[0]
    port.store(listener.port)

    def wait(timeout_ms: float | None, busy_ns: int) -> None:
        listener.wait(context.doorbell, timeout_ms, busy_ns)

    def apply(changed: dict[str, Any]) -> None:
        gateway.apply_settings(changed)
        listener.set_connections_max(limits(changed, own_descriptors).connections_max)

    run(gateway, context, wait, apply)
    gateway.close()


if __name__ == "__main__":
    main()
