"""Listener: the listening sockets of the gateway and its connections, in one epoll.

Owner: one gateway.

Invariants:
- At most `connections_max` connections. Another one is closed when it is accepted.
- The bytes of requests that all connections hold are at most UNSERVED_MAX_BYTES and one read. Above
  that the connection that holds the most is closed.
- The bytes of responses that all connections hold are at most UNSENT_HARD_MAX_BYTES and one
  response. Above that the connection is closed whose first response waits longest. Above
  UNSENT_MAX_BYTES, where the front has others wait with their fetches, it is closed once that
  waits for UNREAD_NS: clients that never read do not keep the others from reading.
- At most STRANGERS_MAX connections are not let in yet: half a handshake of TLS, or no login. For
  one more the oldest of them is closed; each is after STRANGER_NS.
- A request that is incomplete for INCOMPLETE_NS, and a connection that is silent for IDLE_NS, end
  their connection.
- An unexpected error ends the connection that it belongs to. It is logged and counted.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Sequence

from netfront.fetch.fetch_progress import UNSENT_MAX_BYTES
from netfront.kafka.network.connection import READ_BYTES, Connection, FrameError
from shm.queues.doorbell import Doorbell

logger = logging.getLogger(__name__)

BACKLOG = 512
ACCEPTED_AT_ONCE = 64
EVENTS_AT_ONCE = 256
UNSERVED_MAX_BYTES = 128 << 20
UNSENT_HARD_MAX_BYTES = 256 << 20
UNREAD_NS = 15_000_000_000
SWEEP_NS = 5_000_000_000
IDLE_NS = 600_000_000_000
"""Kafka's connections.max.idle.ms."""
INCOMPLETE_NS = 60_000_000_000
STRANGERS_MAX = 500
STRANGER_NS = 30_000_000_000
Connect = Callable[[socket.socket, str, int, int], Connection]
"""(Socket, address of the client, time, number of the listening socket) -> connection."""
OnError = Callable[[str, Exception], str]
"""(Context, error) -> sentence: `shm.runtime.error_handler.CountedErrorHandler.on_error`."""


class CannotListenError(OSError):
    """An address of kafka.listen cannot be listened on."""


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT"; an IPv6 address may stand in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def listening_sockets(addresses: Sequence[str], former_port: int) -> list[socket.socket]:
    """Open the sockets. Port 0 of the first becomes `former_port`, if that is not 0.

    Raises: CannotListenError.
    """
    found: list[socket.socket] = []
    for number, address in enumerate(addresses):
        host, port = split_address(address)
        if not number and not port:
            port = former_port
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError as error:
            for opened in found:
                opened.close()
            raise CannotListenError(
                error.errno,
                f"cannot listen on {address} (kafka.listen): {error.strerror}. Stop the program "
                "that uses it, or choose another address",
            ) from None
    return found


class Listener:
    """All sockets of the gateway."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        connections_max: int,
        on_frames: Callable[[Connection], None],
        on_closed: Callable[[Connection], None],
        on_error: OnError,
        connect: Connect = lambda sock, address, now_ns, _number: Connection(sock, address, now_ns),
    ) -> None:
        """`on_frames` is called when a connection has requests; `on_closed` when one has ended;
        `on_error` for an unexpected error. `connect` makes the connection of an accepted socket.
        """
        self._listening = {sock.fileno(): sock for sock in sockets}
        self._numbers = {sock.fileno(): number for number, sock in enumerate(sockets)}
        self._connect = connect
        self._strangers: dict[Connection, int] = {}
        """Connections that are not let in yet, and when each was accepted; the oldest first."""
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._connections_max = connections_max
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._on_error = on_error
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._events: list[tuple[int, int]] = []
        self._dirty: dict[Connection, None] = {}
        """Connections with responses to send."""
        self._unread: dict[Connection, int] = {}
        """Connections that hold responses, and the time since which the first one of each waits;
        the oldest first.
        """
        self._unsent_bytes = 0
        self._now_ns = 0
        self._swept_ns = 0
        self._bell_fd = -1
        self.is_accepting = False
        self.refused_count = 0
        """Connections closed for a limit or for malformed bytes."""

    @property
    def port(self) -> int:
        """The port of the first address."""
        for sock in self._listening.values():
            return int(sock.getsockname()[1])
        return 0

    @property
    def next_sweep_ns(self) -> int | None:
        """Time of the next sweep; None without connections."""
        return self._swept_ns + SWEEP_NS if self._connections else None

    def __len__(self) -> int:
        return len(self._connections)

    def set_connections_max(self, connections_max: int) -> None:
        """Use a changed limit, for connections that are accepted from now on."""
        self._connections_max = connections_max

    def accept_connections(self) -> None:
        """Begin to accept: the front serves."""
        self.is_accepting = True
        for fd in self._listening:
            self._epoll.register(fd, select.EPOLLIN)

    def unsent_bytes(self) -> int:
        """Bytes of responses that all connections hold."""
        return self._unsent_bytes

    def wait(self, bell: Doorbell, timeout_ms: float | None, busy_ns: int) -> None:
        """Sleep until a socket or the doorbell is ready; poll for `busy_ns` before."""
        if self._bell_fd != bell.fd:
            self._bell_fd = bell.fd
            self._epoll.register(bell.fd, select.EPOLLIN)
        events = self._epoll.poll(0, EVENTS_AT_ONCE)
        until_ns = time.monotonic_ns() + busy_ns if busy_ns and not events else 0
        while until_ns and not events and time.monotonic_ns() < until_ns:
            events = self._epoll.poll(0, EVENTS_AT_ONCE)
        if not events:
            timeout_s = None if timeout_ms is None else timeout_ms / 1_000
            events = self._epoll.poll(timeout_s, EVENTS_AT_ONCE)
        bell.clear()
        self._events = events

    def step(self, now_ns: int) -> int:
        """Serve the sockets that were ready. Return the amount of work."""
        if not self._events:
            self._events = self._epoll.poll(0, EVENTS_AT_ONCE)
        events, self._events = self._events, []
        self._now_ns = now_ns
        work = 0
        for fd, mask in events:
            if fd in self._listening:
                work += self._accept(self._listening[fd], now_ns)
                continue
            connection = self._connections.get(fd)
            if connection is None:
                continue
            work += 1
            if mask & select.EPOLLOUT:
                self._dirty[connection] = None
            if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._guarded(connection, lambda served: self._read(served, now_ns))
        if self._connections and now_ns - self._swept_ns >= SWEEP_NS:
            self._sweep(now_ns)
        return work

    def _accept(self, listening: socket.socket, now_ns: int) -> int:
        count = 0
        while count < ACCEPTED_AT_ONCE:
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    logger.warning("accept_failed error=%r", str(error))
                break
            count += 1
            if len(self._connections) >= self._connections_max:
                self.refused_count += 1
                sock.close()
                logger.warning("connections_full connections=%d", len(self._connections))
                continue
            number = self._numbers[listening.fileno()]
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = self._connect(sock, f"{address[0]}:{address[1]}", now_ns, number)
            except OSError:  # it has gone already
                sock.close()
                continue
            except Exception as error:
                self.refused_count += 1
                sock.close()
                self._on_error(f"kafka_connect={address[0]}:{address[1]}", error)
                continue
            self._connections[connection.fd] = connection
            self._epoll.register(connection.fd, select.EPOLLIN)
            if connection.is_stranger:
                self._strangers[connection] = now_ns
                if len(self._strangers) > STRANGERS_MAX:
                    oldest = next(iter(self._strangers))
                    self.refuse(oldest, f"{STRANGERS_MAX} other clients begin to log in, too")
        return count

    def _guarded(self, connection: Connection, serve: Callable[[Connection], None]) -> None:
        """Serve a connection; close it if that fails unexpectedly."""
        try:
            serve(connection)
        except Exception as error:
            sentence = self._on_error(f"kafka_connection={connection.address}", error)
            if not connection.is_closed:
                self.refuse(connection, sentence)

    def _read(self, connection: Connection, now_ns: int) -> None:
        try:
            count = connection.read(self._scratch, now_ns)
        except FrameError as error:
            self.refuse(connection, str(error))
            return
        except OSError as error:
            self._fail(connection, error)
            return
        if connection in self._strangers and not connection.is_stranger:
            self.let_in(connection)
        if connection.frames:
            self._on_frames(connection)
        if count < 0 and not connection.is_closed:
            self._end(connection)
            return
        self._update(connection)
        if connection.unserved_bytes > READ_BYTES:
            self._bound_unserved()

    def let_in(self, connection: Connection) -> None:
        """Note that a client is no stranger any more."""
        self._strangers.pop(connection, None)

    def _fail(self, connection: Connection, error: OSError) -> None:
        """Close a connection whose socket failed. A handshake that failed is told in the log."""
        reason = getattr(error, "reason", None)
        if connection in self._strangers and reason:
            self.refuse(connection, f"the handshake of TLS failed: {reason}")
        else:
            self.close(connection)

    def _end(self, connection: Connection) -> None:
        """Serve what a client has sent that sends no more, then close its connection."""
        if connection.is_finished:
            self.close(connection)
            return
        self._epoll.unregister(connection.fd)
        connection.is_ended = True
        connection.last_active_ns = self._swept_ns

    def _bound_unserved(self) -> None:
        total = sum(connection.unserved_bytes for connection in self._connections.values())
        if total > UNSERVED_MAX_BYTES:
            largest = max(self._connections.values(), key=lambda c: c.unserved_bytes)
            self.refuse(
                largest, f"all connections hold {total} bytes of requests, this one the most"
            )

    def _update(self, connection: Connection) -> None:
        """Watch the socket for what the connection waits for."""
        if connection.is_closed:
            return
        if connection.is_ended:
            if connection.is_finished:
                self.close(connection)
            return
        reads, writes = not connection.is_full, connection.is_write_due
        if (reads, writes) != (connection.is_reading, connection.is_writing):
            connection.is_reading, connection.is_writing = reads, writes
            mask = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if writes else 0)
            self._epoll.modify(connection.fd, mask)

    # ---- out -------------------------------------------------------------------------------------

    def respond(self, connection: Connection) -> None:
        """Send the responses of a connection that may leave, with the next `flush`."""
        if connection.is_closed:
            return
        if connection.queue_responses() or connection.is_ended:
            self._dirty[connection] = None
            self._count_unsent(connection)
            self._end_unread(UNSENT_HARD_MAX_BYTES, 0)

    def _count_unsent(self, connection: Connection) -> None:
        """Count what a connection holds now."""
        self._unsent_bytes += connection.retained_bytes - connection.counted_bytes
        connection.counted_bytes = connection.retained_bytes
        if connection.retained_bytes:
            self._unread.setdefault(connection, self._now_ns)
        else:
            self._unread.pop(connection, None)

    def _end_unread(self, bytes_max: int, age_ns: int) -> None:
        """While all connections hold more bytes, close the one whose first response waits longest,
        at least `age_ns`.
        """
        while self._unsent_bytes > bytes_max:
            connection, since_ns = next(iter(self._unread.items()))
            if self._now_ns - since_ns < age_ns:
                return
            self.refuse(
                connection,
                f"clients have not read {self._unsent_bytes} bytes of responses, this one's first "
                "one waits longest",
            )

    def flush(self) -> int:
        """Send what the sockets take. Return how many connections had something."""
        if not self._dirty:
            return 0
        dirty, self._dirty = self._dirty, {}
        for connection in dirty:
            if connection.is_closed:
                continue
            self._guarded(connection, self._send)
        return len(dirty) - len(self._dirty)

    def _send(self, connection: Connection) -> None:
        sent_count = connection.sent_count
        try:
            connection.send()
        except OSError as error:
            self._fail(connection, error)
            return
        if connection.sent_count != sent_count:
            self._unread.pop(connection, None)  # another one is the first now
        self._count_unsent(connection)
        if connection.unsent_bytes:
            self._dirty[connection] = None
        elif connection.is_leaving and not connection.exchanges:
            self.close(connection)
            return
        if connection.frames and not connection.exchanges:
            self._on_frames(connection)
        self._update(connection)

    # ---- ends ------------------------------------------------------------------------------------

    def refuse(self, connection: Connection, reason: str) -> None:
        """Close a connection whose bytes cannot be served, and say so."""
        self.refused_count += 1
        logger.warning("kafka_connection_refused peer=%s reason=%r", connection.address, reason)
        self.close(connection)

    def close(self, connection: Connection) -> None:
        """Close a connection."""
        if connection.is_closed:
            return
        if not connection.is_ended:
            self._epoll.unregister(connection.fd)
        del self._connections[connection.fd]
        self._dirty.pop(connection, None)
        self._strangers.pop(connection, None)
        for end in (Connection.close, self._on_closed):
            try:
                end(connection)
            except Exception as error:
                self._on_error(f"kafka_connection_end={connection.address}", error)
        self._count_unsent(connection)

    def _sweep(self, now_ns: int) -> None:
        self._swept_ns = now_ns
        self._end_unread(UNSENT_MAX_BYTES, UNREAD_NS)
        for connection, accepted_ns in list(self._strangers.items()):
            if now_ns - accepted_ns > STRANGER_NS:
                self.refuse(connection, "the client has not logged in for half a minute")
        for connection in list(self._connections.values()):
            since = connection.incomplete_since_ns
            silent_ns = now_ns - connection.last_active_ns
            if since and not connection.is_reading:
                connection.incomplete_since_ns = now_ns  # the rest is there, and not read yet
            elif since and now_ns - since > INCOMPLETE_NS:
                self.refuse(connection, "a request is incomplete for a minute")
            elif silent_ns > (INCOMPLETE_NS if connection.is_ended else IDLE_NS) and (
                connection.is_ended or not connection.exchanges
            ):
                self.close(connection)

    def stop(self) -> None:
        """Accept nothing new."""
        for fd, sock in self._listening.items():
            if self.is_accepting:
                self._epoll.unregister(fd)
            sock.close()
        self._listening.clear()
        self.is_accepting = False

    def close_all(self) -> None:
        """Close every connection."""
        for connection in list(self._connections.values()):
            self.close(connection)
