"""Answers of the console: HTTP by the standard library, metrics by prometheus_client, the page by
`appliance.observe.console`.

The console imports this module with its first connection, in that connection's thread: it brings
some 140 modules and 12 MB, which an unused console does not need. No other process imports it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from appliance.observe.metrics.scrape import StateCollector
from appliance.observe.open_connections import ANSWER_TIMEOUT_S, OpenConnections
from appliance.observe.process_states import ProcessStates

if TYPE_CHECKING:
    from appliance.observe.console.access.guard import Refusal
    from appliance.observe.console.access.logins import Logins
    from appliance.observe.console.access.proxies import Network
    from appliance.observe.console.site import Site

logger = logging.getLogger("appliance.observe.http_server")

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Page = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
PLAIN = ("Content-Type", "text/plain; charset=utf-8")
MAY_CHANGE, IS_LET_IN = "tailrace.may_change", "tailrace.is_let_in"
ACTOR = "tailrace.actor"
"""As `appliance.observe.console.access.guard` has them, which only the page needs."""
OPEN = ("/health/", "/static/")
"""Pages without content of the appliance, which need no login."""
CHANGING = ("/api/change/", "/api/sql")
THERE_ARE = "there are /, /metrics, /health/live and /health/ready"


def pages(
    states: ProcessStates, address: Callable[[], str], site: LazySite, topics_max: int,
    logins: Callable[[], Logins] | None = None,
    is_scraper: Callable[[str], bool] = lambda _token: False, host_names: Collection[str] = (),
) -> Page:  # fmt: skip
    """The WSGI application. `address`: a front's. `logins`: of an appliance that requires users:
    without one only its health, and the page's empty frame, are served. `is_scraper`: True for a
    token that lets its holder read the metrics. `host_names`: names under which the metrics may be
    asked for without such a token, beside addresses and localhost.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(states, address, topics_max))
    metrics = make_wsgi_app(registry)

    def page(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        environ[IS_LET_IN] = lambda: logins is None or logins().refuse(environ) is None
        if path == "/metrics":
            may_scrape = is_scraper(_bearer_of(environ))
            refusal = None if may_scrape else _refuse_foreign_name(environ, host_names)
            if refusal is not None:
                return _refused(refusal, start_response)
        if logins is not None and not path.startswith(OPEN) and path != "/":
            refusal = None if path == "/metrics" and may_scrape else logins().refuse(environ)
            if refusal is not None:
                return _refused(refusal, start_response)
            environ[MAY_CHANGE] = logins().may_change(environ)
            environ[ACTOR] = logins().actor(environ)
        if site.serves(path):
            return site.answer(environ, start_response)
        if path == "/metrics":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        missing = states.not_serving() if path == "/health/ready" else []
        status, text = {
            "/health/live": ("200 OK", "alive"),
            "/health/ready": ("503 Service Unavailable", f"not ready: {', '.join(missing)}")
            if missing
            else ("200 OK", "ready"),
        }.get(path, ("404 Not Found", THERE_ARE))
        start_response(status, [PLAIN])
        return [text.encode() + b"\n"]

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        try:
            if method == "POST" and path == "/api/login" and logins is not None:
                return site.login(logins(), environ, start_response)
            if method == "GET" or (method == "POST" and path.startswith(CHANGING)):
                return page(environ, start_response)
            if method == "HEAD" and path != "/api/events":
                return _headers_alone(page, environ, start_response)
        except Exception:
            logger.exception("request_failed path=%r", path)
            start_response("500 Internal Server Error", [PLAIN])
            return [b"the console failed; its log has the reason\n"]
        start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), PLAIN])
        return [b"there are GET and HEAD\n"]

    return answer


def _bearer_of(environ: dict[str, Any]) -> str:
    scheme, _, token = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
    return token.strip() if scheme == "Bearer" else ""


def _refuse_foreign_name(environ: dict[str, Any], host_names: Collection[str]) -> Refusal | None:
    """Refuse a browser that was led here under a foreign name. A request without a Host is served:
    browsers send one.
    """
    if not environ.get("HTTP_HOST"):
        return None
    from appliance.observe.console.access.guard import refuse_stranger

    return refuse_stranger(environ, host_names)


def _refused(refusal: Refusal, start_response: StartResponse) -> Iterable[bytes]:
    start_response(refusal.status, [PLAIN])
    return [refusal.reason.encode() + b"\n"]


def _headers_alone(
    page: Page, environ: dict[str, Any], start_response: StartResponse
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


class LazySite:
    """The page, whose modules are imported with its first request: scrapes and health checks have
    no use for them.
    """

    def __init__(self, make: Callable[[], Site]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._site: Site | None = None

    def serves(self, path: str) -> bool:
        """True if the path is one of the page's."""
        return path == "/" or path.startswith(("/static/", "/api/"))

    def answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer GET and POST."""
        return self._made().answer(environ, start_response)

    def login(
        self, logins: Logins, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        """Answer POST /api/login."""
        return self._made().login(logins, environ, start_response)

    def _made(self) -> Site:
        with self._lock:
            if self._site is None:
                self._site = self._make()
        return self._site


class HttpService(WSGIServer):
    """Reads requests from connections that the console has accepted, and answers them."""

    def __init__(
        self,
        host: str,
        port: int,
        states: ProcessStates,
        address: Callable[[], str],
        connections: OpenConnections,
        data_dir: str,
        host_names: frozenset[str],
        topics_max: int,
        is_secured: bool = False,
        proxies: Sequence[str] = (),
        *,
        is_audited: bool = False,
    ) -> None:
        """`is_secured`: the appliance requires users, so a request needs the token. `host`,
        `port`: where the console listens; `data_dir` has the token; `host_names`: names
        of this host in requests, beside its addresses; `proxies`: addresses and networks of
        proxies, which name the client; `is_audited`: there is an audit log.
        """
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.server_close()  # the console listens
        self.server_name, self.server_port = host, port
        self.setup_environ()

        def make_site() -> Site:
            from appliance.observe.console.site import make_site

            names = host_names | {host.lower()}
            return make_site(states, address, data_dir, names, is_audited=is_secured and is_audited)

        self._logins: Logins | None = None

        def logins() -> Logins:
            if self._logins is None:
                from appliance.observe.console.access.logins import Logins
                from appliance.observe.console.access.token import Token
                from appliance.observe.console.access.user_logins import UserLogins, find_in_catalog
                from tailrace.format.directory.data_dir import CATALOG_FILE

                users = UserLogins(find_in_catalog(f"{data_dir}/{CATALOG_FILE}"), time.monotonic)
                self._logins = Logins(Token(data_dir).read, time.monotonic, users)
            return self._logins

        def is_scraper(token: str) -> bool:
            if not token:
                return False
            from appliance.observe.console.access.scraper_tokens import METRICS, is_allowed

            return is_allowed(data_dir, token, METRICS, time.time_ns() // 1_000)

        self.set_app(
            pages(
                states, address, LazySite(make_site), topics_max, logins if is_secured else None,
                is_scraper, host_names | {host.lower(), socket.gethostname().lower()},
            )
        )  # fmt: skip
        self.connections = connections
        self._proxies: list[Network] = []
        if proxies:
            from appliance.observe.console.access.proxies import networks_of

            self._proxies = networks_of(proxies)

    def answer(self, connection: socket.socket, client: Any) -> None:
        """Answer one request. Blocking: until the connection ends. Raises OSError."""
        self.finish_request(connection, client)

    def client_address_in(self, environ: dict[str, Any]) -> str:
        """The address of the client of a request, behind proxies too."""
        if not self._proxies:
            return str(environ["REMOTE_ADDR"])
        from appliance.observe.console.access.proxies import client_address

        return client_address(environ, self._proxies)


class _Handler(WSGIRequestHandler):
    timeout = ANSWER_TIMEOUT_S

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        if isinstance(self.server, HttpService):
            self.server.connections.has_asked(self.connection)
        return is_whole

    def get_environ(self) -> dict[str, Any]:
        environ = super().get_environ()
        if isinstance(self.server, HttpService):
            known, connection = self.server.connections, self.connection
            environ["tailrace.begin_stream"] = lambda: known.begin_stream(
                connection, time.monotonic_ns()
            )
            environ["REMOTE_ADDR"] = self.server.client_address_in(environ)
            environ["tailrace.sent"] = lambda: known.has_sent(connection, time.monotonic_ns())
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""
