"""The page over HTTP: static files, the state and its stream, records, queries, changes.

    /, /static/NAME           the page
    /api/state                the newest sample, as JSON
    /api/events               samples as server-sent events
    /api/topic?name=          settings, schema and partitions of a topic
    /api/group?name=          members and offsets of a group
    /api/records?topic=       records (see `records`)
    /api/delays?topic=        pending delayed records
    /api/transactions         transactional ids
    POST /api/sql             {"query": ...}
    POST /api/change/NAME     see `changes`; needs the token

Owner: the thread of each request.
Invariants:
- Each answer has the headers of `guard.SECURITY_HEADERS`.
- A request body has at most BODY_MAX_BYTES.
- A stream ends with the session, or the token, that let it in.
- An error is `{"error": sentence, "code": name}` with a status of 400 to 503.
"""

from __future__ import annotations

import logging
import os
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson

from appliance.observe.console.access import actors, guard
from appliance.observe.console.access.actors import Actor
from appliance.observe.console.access.logins import Logins
from appliance.observe.console.access.token import Token
from appliance.observe.console.sampling.asker import Asker
from appliance.observe.console.sampling.sampler import Sampler, TopicRow
from appliance.observe.console.sql_queries import SqlQueries
from appliance.observe.process_states import ProcessStates
from tailrace.admin.admin import Admin
from tailrace.core.errors import (
    InvalidRequestError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
    UnknownGroupError,
    UnknownTopicError,
)
from tailrace.core.units import digits_in

logger = logging.getLogger("appliance.observe.http_server")

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
BODY_MAX_BYTES = 1 << 20
SAMPLE_TIMEOUT_S = 10.0
EVENT_TIMEOUT_S = 15.0
"""Time after which a stream without a sample gets a comment, so that a dead connection is seen."""
DELAYS_MAX = 200
_REPORTED = ("401", "403")
"""Statuses of logins that were looked at and refused."""
JSON = ("Content-Type", "application/json")
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_STATUS: dict[type[TailraceError], str] = {
    UnknownTopicError: "404 Not Found",
    UnknownGroupError: "404 Not Found",
    NotReachableError: "503 Service Unavailable",
    RequestTimeoutError: "504 Gateway Timeout",
}
STREAMS_FULL = "every stream is taken; the page asks for the state every few seconds instead"


class Site:
    """The page's part of the console's WSGI application. Safe in any thread."""

    def __init__(
        self,
        address: Callable[[], str],
        sampler: Sampler,
        token: Callable[[], str],
        host_names: frozenset[str],
        groups_run: Callable[[], bool],
        *,
        is_audited: bool = False,
    ) -> None:
        """`address`: a front's; `token`: what allows changes; `host_names`: see `guard`;
        `groups_run`: the process of groups runs (a request would start it); `is_audited`: logins
        and queries are reported to the audit log.
        """
        self._address = address
        self._is_audited = is_audited
        self._sampler = sampler
        self._token = token
        self._host_names = host_names
        self._groups_run = groups_run
        self._queries = SqlQueries()
        self._files = _static_files()
        self._reads: dict[str, Callable[[Mapping[str, str], str], Any]] = {
            "state": self._state,
            "topic": self._topic,
            "group": self._group,
            "records": self._records,
            "delays": self._delays,
            "transactions": self._transactions,
        }

    def answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer GET and POST."""
        refusal = guard.refuse_stranger(environ, self._host_names)
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        is_change = path.startswith("/api/change/") and not environ.get(guard.MAY_CHANGE)
        if refusal is None and is_change:
            refusal = guard.refuse_change(environ, self._token_now())
        if refusal is not None:
            return _error(start_response, refusal.status, refusal.reason, "REFUSED")
        try:
            if method == "POST":
                return self._post(path, environ, start_response)
            if not path.startswith("/api/"):
                return self._file(path, start_response)
            if path == "/api/events":
                return self._events(environ, start_response)
            read = self._reads.get(path.removeprefix("/api/"))
            if read is None:
                return _error(start_response, "404 Not Found", f"there is no {path}", "NOT_FOUND")
            query = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
            return _json(start_response, read(query, self._address_for(environ)))
        except TailraceError as error:
            return _error(start_response, _status_of(error), str(error), error.code.name)

    def login(
        self, logins: Logins, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        """Answer a login: what the header has becomes a session's cookie."""
        found = guard.refuse_stranger(environ, self._host_names)
        if found is not None:
            return _error(start_response, found.status, found.reason, "REFUSED")
        let_in, asker = logins.login(environ), logins.asker(environ)
        if isinstance(let_in, guard.Refusal):
            if let_in.status.startswith(_REPORTED):
                self._report(asker, actors.DENIED, f"console: {let_in.reason}")
            return _error(start_response, let_in.status, let_in.reason, "REFUSED")
        self._report(asker, actors.LOGIN)
        cookie, value = let_in
        body = orjson.dumps(value)
        length = ("Content-Length", str(len(body)))
        start_response("200 OK", [JSON, ("Set-Cookie", cookie), length, *guard.SECURITY_HEADERS])
        return [body]

    def _token_now(self) -> str:
        """The token; empty (which allows nothing) while its file cannot be read."""
        try:
            return self._token()
        except OSError as error:
            logger.warning("no_console_token reason=%r", str(error))
            return ""

    def _address_for(self, environ: Mapping[str, Any]) -> str:
        """A front's address, for connections that act for who sends a request."""
        actor: Actor | None = environ.get(guard.ACTOR)
        return self._address() if actor is None else actor.address(self._address())

    def _report(self, actor: Actor, event: str, detail: str = "") -> None:
        if self._is_audited:
            actors.report(self._address(), actor, event, detail)

    # ---- the page --------------------------------------------------------------------------------

    def _file(self, path: str, start_response: StartResponse) -> Iterable[bytes]:
        name = "index.html" if path == "/" else path.removeprefix("/static/")
        content = self._files.get(name)
        if content is None:
            return _error(start_response, "404 Not Found", f"there is no {path}", "NOT_FOUND")
        kind = ("Content-Type", _TYPES[name.rpartition(".")[2]])
        length = ("Content-Length", str(len(content)))
        start_response("200 OK", [kind, length, *guard.SECURITY_HEADERS])
        return [content]

    def _events(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Server-sent events: `state` first, then a `tick` for each sample."""
        if not environ["tailrace.begin_stream"]():
            return _error(start_response, "503 Service Unavailable", STREAMS_FULL, "STREAMS_FULL")
        start_response("200 OK", [("Content-Type", "text/event-stream"), *guard.SECURITY_HEADERS])
        return self._stream(environ["tailrace.sent"], environ[guard.IS_LET_IN])

    def _stream(self, sent: Callable[[], None], is_let_in: Callable[[], bool]) -> Iterator[bytes]:
        shown: dict[str, TopicRow] = {}
        state = self._sampler.state(SAMPLE_TIMEOUT_S)
        number = 0
        if state is not None:
            number = state["number"]
            shown.update(state["topics"])
            yield _event("state", state)
        while is_let_in():
            sent()
            newest = self._sampler.wait(number, EVENT_TIMEOUT_S)
            if not newest:
                yield b": waiting for a sample\n\n"
                continue
            number = newest
            if not is_let_in():
                return
            message = self._sampler.tick(shown)
            if message is not None:
                yield _event("tick", message)

    # ---- reads -----------------------------------------------------------------------------------

    @staticmethod
    def _admin(address: str) -> Admin:
        return Admin(address, client_id=actors.CLIENT_ID)

    def _state(self, _query: Mapping[str, str], _address: str) -> Any:
        state = self._sampler.state(SAMPLE_TIMEOUT_S)
        if state is None:
            raise RequestTimeoutError("there is no sample of the appliance's state yet; try again")
        return state

    def _topic(self, query: Mapping[str, str], address: str) -> Any:
        name = _name(query, "name")
        with self._admin(address) as admin:
            return dict(admin.describe_topics([name])[name])

    def _group(self, query: Mapping[str, str], address: str) -> Any:
        name = _name(query, "name")
        with self._admin(address) as admin:
            return admin.describe_groups(name)[name]

    def _records(self, query: Mapping[str, str], address: str) -> Any:
        from appliance.observe.console.records import browse  # with the consumer's modules

        return browse(address, _name(query, "topic"), query)

    def _delays(self, query: Mapping[str, str], address: str) -> Any:
        rows: list[dict[str, Any]] = []
        with self._admin(address) as admin:
            for delay in admin.list_delays(_name(query, "topic")):
                if len(rows) == DELAYS_MAX:
                    return {"delays": rows, "truncated": True}
                rows.append(
                    {
                        "delay_id": delay.delay_id,
                        "partition": delay.partition,
                        "due_ms": int(delay.due.timestamp() * 1000),
                        "key": None if delay.key is None else delay.key.decode(errors="replace"),
                        "recurs": delay.repeat is not None,
                    }
                )
        return {"delays": rows, "truncated": False}

    def _transactions(self, _query: Mapping[str, str], address: str) -> Any:
        if not self._groups_run():
            return []  # a request would start their process
        with self._admin(address) as admin:
            return list(admin.list_transactions().values())

    # ---- changes ---------------------------------------------------------------------------------

    def _post(
        self, path: str, environ: dict[str, Any], start_response: StartResponse
    ) -> Iterable[bytes]:
        from appliance.observe.console.changes import CHANGES

        request = _body(environ)
        if path == "/api/sql":
            query = request.get("query")
            if not isinstance(query, str) or not query.strip():
                raise InvalidRequestError("query is missing; it is one SQL statement")
            if guard.ACTOR in environ:
                self._report(environ[guard.ACTOR], actors.QUERY, query)
            return _json(start_response, self._queries.run(self._address_for(environ), query))
        change = CHANGES.get(path.removeprefix("/api/change/"))
        if change is None:
            return _error(start_response, "404 Not Found", f"there is no {path}", "NOT_FOUND")
        answer = change(self._address_for(environ), request)
        actor: Actor | None = environ.get(guard.ACTOR)
        user = "" if actor is None else actor.user
        name = path.rpartition("/")[2]
        logger.info("console_change name=%s user=%s fields=%r", name, user, sorted(request))
        return _json(start_response, answer)


def _static_files() -> dict[str, bytes]:
    """Name -> content of the page's files."""
    directory = os.path.join(os.path.dirname(__file__), "static")
    files = {}
    for name in os.listdir(directory):
        if name.rpartition(".")[2] in _TYPES:
            with open(os.path.join(directory, name), "rb") as file:
                files[name] = file.read()
    return files


def make_site(
    states: ProcessStates, address: Callable[[], str], data_dir: str, host_names: frozenset[str],
    *, is_audited: bool = False,
) -> Site:  # fmt: skip
    """The page of this appliance. `address`: a front's; `data_dir` has the token."""
    asker = Asker(states, address)
    sampler = Sampler(asker.take, asker.close)
    return Site(
        address, sampler, Token(data_dir).read, host_names, asker.groups_run, is_audited=is_audited
    )


def _body(environ: Mapping[str, Any]) -> dict[str, Any]:
    """The request's JSON object. Raises InvalidRequestError."""
    length = digits_in(str(environ.get("CONTENT_LENGTH") or "0"))
    if length is None or length > BODY_MAX_BYTES:
        raise InvalidRequestError(f"a request has at most {BODY_MAX_BYTES} bytes")
    if environ.get("CONTENT_TYPE", "").partition(";")[0] != "application/json":
        raise InvalidRequestError("the request is not application/json")
    try:
        request = orjson.loads(environ["wsgi.input"].read(length))
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise InvalidRequestError("the request is not a JSON object")
    return request


def _name(query: Mapping[str, str], field: str) -> str:
    if not query.get(field):
        raise InvalidRequestError(f"{field} is missing")
    return query[field]


def _status_of(error: TailraceError) -> str:
    return next(
        (status for kind, status in _STATUS.items() if isinstance(error, kind)), "400 Bad Request"
    )


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _json(start_response: StartResponse, content: Any) -> Iterable[bytes]:
    body = orjson.dumps(content, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    length = ("Content-Length", str(len(body)))
    start_response("200 OK", [JSON, length, *guard.SECURITY_HEADERS])
    return [body]


def _error(start_response: StartResponse, status: str, reason: str, code: str) -> Iterable[bytes]:
    body = orjson.dumps({"error": reason, "code": code})
    length = ("Content-Length", str(len(body)))
    start_response(status, [JSON, length, *guard.SECURITY_HEADERS])
    return [body]


def _event(name: str, content: Any) -> bytes:
    body = orjson.dumps(content, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
