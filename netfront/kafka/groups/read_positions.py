"""ReadPositions: the topic that each client reads under a name. It finds a client that goes on with
its offset in a topic that was deleted and created again.

Kafka's clients name topics in their commits, and keep their positions when the id behind a name
changes. Their next fetch would begin in the midst of the new topic, and their next commit would
make the group skip its first records.

Owner: one gateway, in memory.

Invariants:
- A position is of the topic whose id the connection has fetched it with.
- A position is called stale only for a client that has read another topic of the name, over a
  connection that is open, and goes on where it was in that one.

Crash: behind a restart of the gateway nothing is known, and clients go on as with Kafka.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

NAMES_MAX = 10_000
PARTITIONS_MAX = 10_000
"""The most partitions of a connection that are known. The oldest go first."""
CONNECTIONS_MAX = 16
"""A client id of a host and user with more connections that fetch is several clients, of which
nothing is known.
"""
SEVERAL = b""
Place = tuple[str, int]
"""(topic, partition)"""
Client = tuple[str, str, str]
"""(client id, host, user)"""


class _Read(NamedTuple):
    topic_id: bytes
    first: int
    """The position lies between the offset of the last fetch and the end of what it returned."""
    end: int


class ReadPositions:
    """The positions of all connections that fetch."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, OrderedDict[Place, _Read]] = WeakKeyDictionary()
        self._connections: dict[Client, WeakSet[object]] = {}
        self._topic_ids: OrderedDict[str, bytes] = OrderedDict()
        """name -> the id that was fetched; SEVERAL: not always the same."""

    def fetch(
        self, connection: object, client: Client, place: Place, topic_id: bytes, offset: int
    ) -> bool:
        """Note a fetch from `offset`. Returns False, once, if the offset is the client's position
        in another topic of this name.
        """
        positions = self._of.get(connection)
        if positions is None:
            positions = self._of[connection] = OrderedDict()
            self._connections.setdefault(client, WeakSet()).add(connection)
            self._forget_clients()
        known = positions.get(place)
        positions[place] = _Read(topic_id, offset, offset)
        if known is not None and known.topic_id == topic_id:
            return True
        self._note(place[0], topic_id)
        if len(positions) > PARTITIONS_MAX:
            positions.popitem(last=False)
        return known is None or not offset or not known.first <= offset <= known.end

    def fetched(self, connection: object, place: Place, end: int) -> None:
        """Note the end of what the last fetch returned."""
        positions = self._of.get(connection)
        known = None if positions is None else positions.get(place)
        if positions is not None and known is not None:
            positions[place] = known._replace(end=max(known.end, end))

    def is_stale(self, client: Client, place: Place, topic_id: bytes) -> bool:
        """True if the client's position in this partition is of another topic of the name."""
        if self._topic_ids.get(place[0], topic_id) == topic_id:
            return False  # nearly always
        connections = self._connections.get(client, ())
        if len(connections) > CONNECTIONS_MAX:
            return False
        found = {
            known.topic_id
            for connection in connections
            if (known := self._of[connection].get(place)) is not None
        }
        return bool(found) and topic_id not in found

    def _note(self, name: str, topic_id: bytes) -> None:
        if self._topic_ids.setdefault(name, topic_id) != topic_id:
            self._topic_ids[name] = SEVERAL
        if len(self._topic_ids) > NAMES_MAX:
            self._topic_ids.popitem(last=False)

    def _forget_clients(self) -> None:
        """Forget clients without connections, now and then."""
        if len(self._connections) > 2 * len(self._of) + 16:
            for client in [one for one, some in self._connections.items() if not some]:
                del self._connections[client]
