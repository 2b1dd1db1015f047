"""Call: one request of a Kafka client, as its handler gets it.

A handler is a generator: it yields waiters (`netfront.kafka.exchange.waiter`) and returns the
response as a dict, as bytes that follow the correlation id, or None for no response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from netfront.agent.front_agent import Front
from netfront.kafka.exchange.peers import Peer
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.network.connection import Connection
from netfront.kafka.wire.errors import KafkaError
from netfront.partition_routes import PartitionRoutes
from shm.runtime.timing_wheel import TimingWheel
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.kafka.login.login import Logins
    from shm.rights.authorizer import Principal

NODE_ID = 0
"""The gateway's node id: one broker, which is the controller and every coordinator."""


class RefusedError(Exception):
    """A request that is answered with an error of Kafka at its top level."""

    def __init__(self, code: KafkaError, sentence: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


class DisconnectError(Exception):
    """A request after which the connection is closed, as Kafka does where no answer is possible."""


@dataclass(slots=True)
class Services:
    """All that the handlers of one gateway share."""

    front: Front
    routes: PartitionRoutes
    timers: TimingWheel[Callable[[], None]]
    cluster_id: str
    data_dirs: list[str]
    settings: dict[str, Any]
    monotonic_ns: Callable[[], int]
    now_ns: int = 0
    """Time of this loop step."""
    wall_us: Callable[[], int] = lambda: 0
    """Microseconds since 1970."""
    go_on: Callable[[Connection], None] = lambda _connection: None
    """Begin the requests of a connection that waited for `Connection.is_blocked`."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that a subject keeps between requests, by its name."""
    gate: Gate | None = None
    """Users and rights. None: the appliance has no users, and everybody may do everything."""
    logins: Logins | None = None
    """None: nobody logs in."""
    own_peer: Peer | None = None
    """A client of the appliance's own: for what a response is made of and its user may not list,
    and for what no request asks for. None: in tests.
    """
    let_in: Callable[[Connection], None] = lambda _connection: None
    """Note that a connection's client has logged in."""


class Call(NamedTuple):
    """One request."""

    services: Services
    connection: Connection
    peer: Peer
    api: int
    version: int
    client_id: str
    request: dict[str, Any]
    principal: Principal | None = None
    """None: the appliance has no users."""

    @property
    def user(self) -> str:
        """The client's user; "": the appliance has no users."""
        return "" if self.principal is None else self.principal.user

    @property
    def client(self) -> tuple[str, str, str]:
        """(client id, host, user), by which the connections of one client are told from others."""
        return self.client_id, self.connection.address.rpartition(":")[0], self.user

    def may(self, operation: str, kind: str, name: str) -> bool:
        """True if the client's user may do this."""
        return self.principal is None or self.principal.may(operation, kind, name)

    def ask(self, api: Api, value: dict[str, Any]) -> Any:
        """Ask the front; the waiter gets an Answer."""
        return self.peer.ask_json(api, value)


Handler = Callable[[Call], Steps]


class Row(NamedTuple):
    """An API that works: its versions, and its handler."""

    low: int
    high: int
    handler: Handler
