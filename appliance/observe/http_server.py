"""The console: state of the appliance over HTTP, for Prometheus and health checks.

    /               the page (see `appliance.observe.console`)
    /metrics        Prometheus text (see `appliance.observe.metrics.families`)
    /health/live    200 while this process answers: it ends with the supervisor
    /health/ready   200 when every process serves, every directory takes writes and groups are
                    served, else 503 and the names of those that do not

Owner: its listening socket. Each scrape reads the control region and asks a front as a client does.
Invariants:
- No record depends on the console. It is started when everything serves. If its port is taken, it
  logs that and retries.
- Each request has a thread, and the agent's step never waits for one.
- A connection that is silent or slow delays no other (see `appliance.observe.open_connections`).
- The modules that read HTTP and write metrics are imported with the first connection, by its thread
  (see `appliance.observe.http_service`).
Crash: a successor listens again.

Run by `tailrace.launcher`, isolated.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from appliance.config.relations import split_host_port
from appliance.config.settings import Settings
from appliance.observe.occupancy import OccupancyReader
from appliance.observe.open_connections import OpenConnections
from appliance.observe.process_states import ProcessStates
from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import ProcessWord, Role
from shm.runtime.agent_runner import ProcessContext, configure_logging, run, start
from tailrace.protocol.listeners import front_address

if TYPE_CHECKING:
    from appliance.observe.http_service import HttpService

logger = logging.getLogger(__name__)

BACKLOG = 64
BIND_RETRY_NS = 5_000_000_000


def _listen(host: str, port: int) -> socket.socket:
    """Bind and listen. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class Console:
    """An agent (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        host: str,
        port: int,
        states: ProcessStates,
        address: Callable[[], str],
        port_cell: AtomicCounter,
        *,
        may_move: bool,
        data_dir: str,
        host_names: frozenset[str],
        topics_max: int,
        is_secured: bool = False,
        proxies: Sequence[str] = (),
        is_audited: bool = False,
    ) -> None:
        """`address`: a front's; `port_cell`: where its port is shown; `may_move`: to a free port
        when another program has this one; `data_dir` has the token for changes; `host_names`:
        names under which browsers may ask, beside addresses and localhost; `topics_max`: topics
        with metrics of their own; `proxies`: addresses and networks of proxies before it;
        `is_audited`: there is an audit log.
        """
        self._host = host
        self._port = port
        self._states = states
        self._address = address
        self._connections = OpenConnections()
        self._service: HttpService | None = None
        self._service_lock = threading.Lock()
        self._port_cell = port_cell
        self._may_move = may_move
        self._data_dir = data_dir
        self._host_names = host_names
        self._topics_max = topics_max
        self._is_secured = is_secured
        self._proxies = proxies
        self._is_audited = is_audited
        port_cell.store(0)
        self._listener: socket.socket | None = None
        self._bind_at_ns: int | None = 0

    @property
    def fd(self) -> int | None:
        """Descriptor that is readable when a request comes."""
        return None if self._listener is None else self._listener.fileno()

    def step(self, now_ns: int) -> int:
        if self._bind_at_ns is not None and now_ns >= self._bind_at_ns:
            self._bind(now_ns)
        if self._listener is not None:
            self._connections.end_late(now_ns)
            try:
                connection, client = self._listener.accept()
            except OSError:
                return 0  # there is none, or it went away
            self._serve(connection, client)
        return 0

    def _serve(self, connection: socket.socket, client: Any) -> None:
        """Answer a new connection in a thread, if the limit allows another."""
        if not self._connections.add(connection, time.monotonic_ns()):
            connection.close()
            return
        try:
            threading.Thread(target=self._answer, args=(connection, client), daemon=True).start()
        except RuntimeError as error:  # the kernel refuses another thread
            logger.warning("no_thread reason=%r", str(error))
            self._close(connection)

    def _answer(self, connection: socket.socket, client: Any) -> None:
        try:
            service = self._loaded_service()
            self._connections.begin_request(connection, time.monotonic_ns())
            service.answer(connection, client)
        except OSError:
            pass  # it went away, or was too slow
        except Exception:
            logger.exception("request_failed client=%r", client)
        finally:
            self._close(connection)

    def _loaded_service(self) -> HttpService:
        with self._service_lock:
            if self._service is None:
                from appliance.observe.http_service import HttpService  # see there

                self._service = HttpService(
                    self._host,
                    self._port_cell.load(),
                    self._states,
                    self._address,
                    self._connections,
                    self._data_dir,
                    self._host_names,
                    self._topics_max,
                    self._is_secured,
                    self._proxies,
                    is_audited=self._is_audited,
                )
            return self._service

    def _close(self, connection: socket.socket) -> None:
        self._connections.remove(connection)
        connection.close()

    def _bind(self, now_ns: int) -> None:
        try:
            self._listener = self._bound()
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
        port = self._listener.getsockname()[1]
        self._port_cell.store(port)
        logger.info("console address=http://%s:%d", self._host, port)

    def _bound(self) -> socket.socket:
        """Listen at the port, or at a free one if it may move. Raises OSError."""
        try:
            return _listen(self._host, self._port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not self._may_move:
                raise
        listener = _listen(self._host, 0)
        logger.warning(
            "console_moved port=%d taken=%d advice='set http.listen to a port of its own, so that "
            "it stays'",
            listener.getsockname()[1],
            self._port,
        )
        return listener

    def has_more(self) -> bool:
        return False

    def next_deadline_ns(self) -> int | None:
        return self._bind_at_ns if self._listener is None else self._connections.next_end_ns()

    def begin_stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
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
        started = [
            (role, 0)
            for role in (Role.SCHEDULER, Role.GROUPS)
            if context.control.process(role, 0).load(ProcessWord.GENERATION)
        ]
        started += [
            (Role.CLEANER, d)
            for d in range(len(context.spec.data_dirs))
            if context.control.process(Role.CLEANER, d).is_live()
        ]
        return [
            (Role.SUPERVISOR, 0), (Role.CONTROLLER, 0), (Role.CONSOLE, 0),
            *started, *((Role.FRONT, f) for f in range(settings["fronts"])),
            *((Role.FLUSHER, d) for d in range(len(context.spec.data_dirs))),
            *((Role.WORKER, w) for w in [*range(settings["workers"]), *spares]),
        ]  # fmt: skip

    def address() -> str:
        listen = settings["listen"]
        if settings["security"]:
            from shm.rights.server_keys import address_for_keys

            listen = [address_for_keys(listen)]
        address = front_address(listen[0], 0, context.control.port(0).load())
        address = (
            address.replace("//*:", "//127.0.0.1:")
            .replace("//0.0.0.0:", "//127.0.0.1:")
            .replace("//[::]:", "//[::1]:")
        )
        if settings["security"]:
            return f"context:{context.spec.data_dirs[0]}/own.context#{address}"
        return address

    listen = settings["http.listen"]
    return Console(
        *split_host_port(listen),
        ProcessStates(
            context.control, roles, context.spec.data_dirs,
            OccupancyReader(context.spec.regions, context.attach),
            settings["fronts"] - 1 if settings["gateways"] else None,
        ),
        address,
        context.slot.cell(ProcessWord.HTTP_PORT),
        may_move=listen == Settings().http_listen,
        data_dir=context.spec.data_dirs[0],
        host_names=frozenset(name.lower() for name in settings["http.hosts"]),
        proxies=settings["http.proxies"],
        topics_max=settings["metrics.topics"],
        is_secured=settings["security"],
        is_audited=settings["audit"] is not None,
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
