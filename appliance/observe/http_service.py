"""Answers of the console: HTTP by the standard library, metrics by prometheus_client.

The console imports this module with its first connection, in that connection's thread: it brings
some 140 modules and 12 MB, which a console that nobody asks has no use for. No other process
imports it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from appliance.observe.open_connections import ANSWER_TIMEOUT_S
from appliance.observe.process_states import ProcessStates
from appliance.observe.scrape import StateCollector
from tailrace import __version__

logger = logging.getLogger("appliance.observe.http_server")

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Page = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]
PLAIN = ("Content-Type", "text/plain; charset=utf-8")


def pages(states: ProcessStates, address: Callable[[], str]) -> Page:
    """The WSGI application. `address`: a front's."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(states, address))
    metrics = make_wsgi_app(registry)

    def page(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        missing = states.not_serving() if path == "/health/ready" else []
        status, text = {
            "/": ("200 OK", f"Tailrace {__version__}: /metrics, /health/live, /health/ready"),
            "/health/live": ("200 OK", "alive"),
            "/health/ready": ("503 Service Unavailable", f"not ready: {', '.join(missing)}")
            if missing
            else ("200 OK", "ready"),
        }.get(path, ("404 Not Found", "there are /metrics, /health/live and /health/ready"))
        start_response(status, [PLAIN])
        return [text.encode() + b"\n"]

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        try:
            if environ["REQUEST_METHOD"] == "GET":
                return page(environ, start_response)
            if environ["REQUEST_METHOD"] == "HEAD":
                return _headers_alone(page, environ, start_response)
        except Exception:
            logger.exception("request_failed path=%r", environ["PATH_INFO"])
            start_response("500 Internal Server Error", [PLAIN])
            return [b"the console failed; its log has the reason\n"]
        start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), PLAIN])
        return [b"there are GET and HEAD\n"]

    return answer


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


class HttpService(WSGIServer):
    """Reads requests from connections that the console has accepted, and answers them."""

    def __init__(
        self,
        host: str,
        port: int,
        states: ProcessStates,
        address: Callable[[], str],
        has_asked: Callable[[socket.socket], None],
    ) -> None:
        """`host`, `port`: where the console listens; `has_asked` is called when the request of a
        connection has come.
        """
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.server_close()  # the console listens
        self.server_name, self.server_port = host, port
        self.setup_environ()
        self.set_app(pages(states, address))
        self.has_asked = has_asked

    def answer(self, connection: socket.socket, client: Any) -> None:
        """Answer one request. Blocking: until the connection ends. Raises OSError."""
        self.finish_request(connection, client)


class _Handler(WSGIRequestHandler):
    timeout = ANSWER_TIMEOUT_S

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        if isinstance(self.server, HttpService):
            self.server.has_asked(self.connection)
        return is_whole

    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""
