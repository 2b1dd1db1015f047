"""Actors: who uses the page, as the audit log has it.

The console asks the appliance with the appliance's own key. Its connections say whom they act for,
so that lines have the user and the address of the browser. The front believes it of that key alone.

Owner: the thread of a request.
Invariants:
- A report that fails costs neither a login nor a query: it is logged, and given up after
  REPORT_TIMEOUT_MS.
- A login that is refused because too many have failed is not reported: it costs no connection.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.credentials import SCHEME, acting_address
from tailrace.client.connections.runtime import SYSTEM
from tailrace.client.connections.steps import call_now
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api

logger = logging.getLogger("appliance.observe.http_server")

CLIENT_ID = "tailrace-console"
REPORT_TIMEOUT_MS = 3_000
DETAIL_MAX = 1_000
NAME_MAX = 100
LOGIN, DENIED, QUERY = "login", "denied", "query"


class Actor(NamedTuple):
    """A user of the page."""

    user: str
    """Empty: the console's token has let them in."""
    host: str
    """Address of the browser."""

    def address(self, address: str, event: str = "", detail: str = "") -> str:
        """The address of a front for a connection that acts for the actor. Unchanged where the
        appliance requires no users.
        """
        if not address.startswith(SCHEME):
            return address
        fields = {"user": self.user[:NAME_MAX], "address": self.host}
        if event:
            fields |= {"event": event, "detail": detail[:DETAIL_MAX]}
        return acting_address(address, fields)


def report(address: str, actor: Actor, event: str, detail: str = "") -> None:
    """Have the front write an event of the page into the audit log. Blocking: until it has it."""
    connection = Connection(actor.address(address, event, detail), CLIENT_ID, SYSTEM, "console")
    try:
        call_now(connection, Api.PING, [], REPORT_TIMEOUT_MS)
    except TailraceError as error:
        logger.warning("audit_event_lost event=%s user=%r reason=%r", event, actor.user, str(error))
    finally:
        connection.close()
