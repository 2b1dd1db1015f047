"""The console: state of the appliance over HTTP, for Prometheus and health checks.

    /               an index
    /metrics        Prometheus text (see `appliance.observe.metrics`)
    /health/live    200 while this process answers: it ends with the supervisor
    /health/ready   200 when every process serves, else 503 and the names of those that do not

Owner: its listening socket. Each scrape reads the control region and asks a front as a client does.
Invariants:
- No record depends on the console. It is started when everything serves. If its port is taken, it
  logs that and retries.
- Each request has a thread, and the agent's step never waits for one.
- At most CONNECTIONS_MAX connections are open. When all are taken, the oldest that has not sent its
  request is closed.
- A connection is closed if its request is not complete after REQUEST_TIMEOUT_S, or its answer not
  taken after ANSWER_TIMEOUT_S, however steadily it trickles.
Crash: a successor listens again.

Run by `tailrace.launcher`, isolated.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from appliance.config.settings import Settings, split_host_port
from appliance.observe.group_metrics import ObservedGroups, observe_groups
from appliance.observe.metrics import Observed, ProcessState, families
from shm.atomic_word import AtomicCounter
from shm.control import Control
from shm.layout import Phase, ProcessWord, Role
from shm.runtime.agent_runner import ProcessContext, configure_logging, run, start
from tailrace import __version__
from tailrace.admin.admin import Admin
from tailrace.core.errors import TailraceError
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.listeners import front_address

logger = logging.getLogger(__name__)

ASK_TIMEOUT_MS = 3_000
REQUEST_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 20.0
"""Longest time of a connection from its beginning. A scrape of a front that does not answer takes
several ASK_TIMEOUT_MS.
"""
CONNECTIONS_MAX = 16
NS_PER_S = 1_000_000_000
BIND_RETRY_NS = 5_000_000_000
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class StateReader(Collector):
    """Collector that reads the appliance's state for each scrape."""

    def __init__(
        self,
        control: Control,
        roles: Callable[[], list[tuple[Role, int]]],
        address: Callable[[], str],
    ) -> None:
        """`roles`: the processes that should run. `address`: a front's."""
        self._control = control
        self._roles = roles
        self._address = address
        self._version = __version__

    def collect(self) -> Iterator[Metric]:
        return families(self.observe())

    def processes(self) -> list[ProcessState]:
        found = []
        for role, index in self._roles():
            slot = self._control.process(role, index)
            generation = slot.load(ProcessWord.GENERATION)
            is_ready = (
                role is Role.SUPERVISOR or slot.load(ProcessWord.READY_GENERATION) == generation
            )
            resident_bytes, failures = (
                _resident_bytes(slot.load(ProcessWord.PID)),
                slot.load(ProcessWord.INTERNAL_ERRORS),
            )
            found.append(
                ProcessState(
                    role, index, slot.is_live(), is_ready, generation, resident_bytes, failures
                )
            )
        return found

    def observe(self) -> Observed:
        processes = self.processes()
        try:
            with Admin(
                self._address(),
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
                    self._version,
                    True,
                    admin.describe_cluster(),
                    list(admin.offsets(partitions).values()),
                    admin.describe_delays(),
                    self._groups(admin),
                )
        except TailraceError as error:
            logger.warning("front_does_not_answer reason=%r", str(error))
            return Observed(processes, self._version)

    def _groups(self, admin: Admin) -> ObservedGroups | None:
        """Ask for groups only while their process runs, for a request would start it."""
        process = self._control.process(Role.GROUPS, 0)
        if not process.load(ProcessWord.GENERATION):
            return None
        try:
            return observe_groups(admin, process.load(ProcessWord.OFFSET_COMMITS))
        except TailraceError as error:
            logger.warning("groups_do_not_answer reason=%r", str(error))
            return None

    def not_serving(self) -> list[str]:
        """Names of processes that do not serve; empty: the appliance is ready."""
        if self._control.phase is not Phase.RUNNING:
            return [f"the appliance is {self._control.phase.name.lower()}"]
        return [
            process.name
            for process in self.processes()
            if not (process.is_live and process.is_ready)
        ]


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def pages(reader: StateReader) -> Callable[[dict[str, Any], StartResponse], Iterable[bytes]]:
    """The WSGI application."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(reader)
    metrics = make_wsgi_app(registry)

    def page(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        missing = reader.not_serving() if path == "/health/ready" else []
        status, text = {
            "/": ("200 OK", f"Tailrace {__version__}: /metrics, /health/live, /health/ready"),
            "/health/live": ("200 OK", "alive"),
            "/health/ready": ("503 Service Unavailable", f"not ready: {', '.join(missing)}")
            if missing
            else ("200 OK", "ready"),
        }.get(path, ("404 Not Found", "there are /metrics, /health/live and /health/ready"))
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode() + b"\n"]

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            return page(environ, start_response)
        if environ["REQUEST_METHOD"] == "HEAD":
            return _headers_alone(page, environ, start_response)
        start_response(
            "405 Method Not Allowed",
            [("Allow", "GET, HEAD"), ("Content-Type", "text/plain; charset=utf-8")],
        )
        return [b"there are GET and HEAD\n"]

    return answer


def _headers_alone(
    page: Callable[..., Iterable[bytes]], environ: dict[str, Any], start_response: StartResponse
) -> Iterable[bytes]:
    """Answer HEAD: the headers of GET without its body, which the server (wsgiref) would send."""
    begun: list[tuple[str, list[tuple[str, str]]]] = []
    asked = {**environ, "REQUEST_METHOD": "GET"}
    length = sum(
        len(piece) for piece in page(asked, lambda status, headers: begun.append((status, headers)))
    )
    status, headers = begun[0]
    start_response(status, [*headers, ("Content-Length", str(length))])
    return []


class _Handler(WSGIRequestHandler):
    timeout = ANSWER_TIMEOUT_S

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        if isinstance(self.server, _Server):
            self.server.connections.has_asked(self.connection)
        return is_whole

    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""

    def handle(self) -> None:
        try:
            super().handle()
        except (TimeoutError, ConnectionError):
            pass  # it went away


class _Connections:
    """Open connections, each with a thread. The agent's thread ends those that take too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, tuple[int, bool]] = {}
        """-> (when it is closed, whether its request has come); the oldest first."""

    def add(self, connection: socket.socket, now_ns: int) -> bool:
        """Register a connection; False if the limit is reached and each has sent its request."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                silent = next(
                    (known for known, (_, has_asked) in self._open.items() if not has_asked), None
                )
                if silent is None:
                    return False
                self._end(silent)
            self._open[connection] = (now_ns + int(REQUEST_TIMEOUT_S * NS_PER_S), False)
            return True

    def has_asked(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._open:
                self._open[connection] = (
                    self._open[connection][0]
                    + int((ANSWER_TIMEOUT_S - REQUEST_TIMEOUT_S) * NS_PER_S),
                    True,
                )

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def end_late(self, now_ns: int) -> None:
        with self._lock:
            for connection in [
                known for known, (end_ns, _) in self._open.items() if now_ns >= end_ns
            ]:
                self._end(connection)

    def next_end_ns(self) -> int | None:
        with self._lock:
            return min((end_ns for end_ns, _ in self._open.values()), default=None)

    def _end(self, connection: socket.socket) -> None:
        """Shut a connection down. Its thread sees the end in any wait, and closes it."""
        del self._open[connection]
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was quicker


class _Server(WSGIServer):
    timeout = 0
    """Seconds that a step waits for a request."""
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self.connections = _Connections()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in a thread, if the limit allows another."""
        if not self.connections.add(request, time.monotonic_ns()):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # it went away, or was too slow
        except Exception:
            logger.exception("request_failed client=%r", client_address)
        finally:
            self.connections.remove(request)
            self.shutdown_request(request)


class Console:
    """An agent (see `shm.runtime.agent_runner`)."""

    def __init__(
        self, host: str, port: int, reader: StateReader, port_cell: AtomicCounter, *, may_move: bool
    ) -> None:
        """`port_cell`: where its port is shown; `may_move`: to a free port when another program has
        this one.
        """
        self._host = host
        self._port = port
        self._reader = reader
        self._port_cell = port_cell
        self._may_move = may_move
        port_cell.store(0)
        self._server: _Server | None = None
        self._bind_at_ns: int | None = 0

    @property
    def fd(self) -> int | None:
        """Descriptor that is readable when a request comes."""
        return None if self._server is None else self._server.fileno()

    def step(self, now_ns: int) -> int:
        if self._bind_at_ns is not None and now_ns >= self._bind_at_ns:
            self._bind(now_ns)
        if self._server is not None:
            self._server.connections.end_late(now_ns)
            self._server.handle_request()
        return 0

    def _bind(self, now_ns: int) -> None:
        try:
            self._server = self._listen()
        except OSError as error:
            if not self._bind_at_ns:
                logger.error(
                    "console_not_bound address=%s:%d reason=%r advice='set http.listen to a free "
                    "port'",
                    self._host,
                    self._port,
                    str(error),
                )
            self._bind_at_ns = now_ns + BIND_RETRY_NS
            return
        self._bind_at_ns = None
        self._server.set_app(pages(self._reader))
        self._port_cell.store(self._server.server_port)
        logger.info("console address=http://%s:%d", self._host, self._server.server_port)

    def _listen(self) -> _Server:
        """Bind and listen.

        Raises: OSError.
        """
        try:
            return _Server(self._host, self._port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not self._may_move:
                raise
        server = _Server(self._host, 0)
        logger.warning(
            "console_moved port=%d taken=%d advice='set http.listen to a port of its own, so that "
            "it stays'",
            server.server_port,
            self._port,
        )
        return server

    def has_more(self) -> bool:
        return False

    def next_deadline_ns(self) -> int | None:
        return self._bind_at_ns if self._server is None else self._server.connections.next_end_ns()

    def begin_stop(self) -> None:
        if self._server is not None:
            self._server.server_close()
            self._server = None
        self._bind_at_ns = None

    def is_finished(self) -> bool:
        return True


def build(context: ProcessContext) -> Console:
    """Make the console of this specification."""
    settings = context.spec.settings

    def roles() -> list[tuple[Role, int]]:
        spares = [
            w
            for w in settings["spare_workers"]
            if context.control.process(Role.WORKER, w).load(ProcessWord.DEDICATED_TO)
        ]
        groups = (
            [(Role.GROUPS, 0)]
            if context.control.process(Role.GROUPS, 0).load(ProcessWord.GENERATION)
            else []
        )
        return [
            (Role.SUPERVISOR, 0), (Role.CONTROLLER, 0), (Role.CONSOLE, 0), (Role.SCHEDULER, 0),
            *groups, *((Role.FRONT, f) for f in range(settings["fronts"])),
            *((Role.FLUSHER, d) for d in range(len(context.spec.data_dirs))),
            *((Role.WORKER, w) for w in [*range(settings["workers"]), *spares]),
        ]  # fmt: skip

    def address() -> str:
        address = front_address(settings["listen"][0], 0, context.control.port(0).load())
        return (
            address.replace("//*:", "//127.0.0.1:")
            .replace("//0.0.0.0:", "//127.0.0.1:")
            .replace("//[::]:", "//[::1]:")
        )

    listen = settings["http.listen"]
    return Console(
        *split_host_port(listen), StateReader(context.control, roles, address),
        context.slot.cell(ProcessWord.HTTP_PORT),
        may_move=listen == Settings().http_listen,
    )  # fmt: skip


def main() -> None:
    """Run the process."""
    context = start()
    configure_logging(context)
    console = build(context)
    context.report_ready()

    def wait(timeout_ms: float | None, _busy_ns: int) -> None:
        """Wait until the doorbell rings or a request comes."""
        poll = select.poll()
        poll.register(context.doorbell.fd, select.POLLIN)
        if console.fd is not None:
            poll.register(console.fd, select.POLLIN)
        poll.poll(timeout_ms)
        context.doorbell.clear()

    run(console, context, wait)


if __name__ == "__main__":
    main()
