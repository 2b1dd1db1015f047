"""Checks of a request before the page answers it: its Host, its Origin, its token.

Invariants:
- Pure: a function of the request's headers.
- A browser that was led to the console under a foreign name (DNS rebinding) is refused: the Host
  is an address, `localhost`, or a name that the operator has configured.
- A page of another origin neither reads nor changes anything: its Origin is refused, and there are
  no CORS headers.
- A change needs the token. It travels in a header, never in a cookie or an address, so that no
  other page can send it.

Source: OWASP's cheat sheets on DNS rebinding, CSRF (custom header) and Content-Security-Policy.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = [
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]
"""Headers of every answer of the page. Names and values of records are text to the browser."""
_SCHEME = "Bearer "
MAY_CHANGE = "tailrace.may_change"
"""Set in the request of a user's session that may change something. No header can set it."""


IS_LET_IN = "tailrace.is_let_in"
"""Set in each request: says whether its sender would be let in now. A stream asks it."""


ACTOR = "tailrace.actor"
"""Set in each request that a login has let in: its `Actor`."""


class Refusal(NamedTuple):
    """An answer that replaces the one asked for."""

    status: str
    reason: str


def refuse_stranger(environ: Mapping[str, Any], host_names: Collection[str]) -> Refusal | None:
    """Refuse a request that came under a foreign name, or from a page of another origin. None:
    the request is served. `host_names`: names in lower case, beside addresses and localhost.
    """
    host = str(environ.get("HTTP_HOST", ""))
    if not _is_own_name(_name_of(host), host_names):
        return Refusal(
            "421 Misdirected Request",
            f"this console is not {host[:100]!r}; open it by its address, or add the name to the "
            "setting http.hosts",
        )
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return Refusal("403 Forbidden", "a page of another origin may not use this console")
    if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
        return Refusal("403 Forbidden", "a page of another site may not use this console")
    return None


def refuse_change(environ: Mapping[str, Any], token: str) -> Refusal | None:
    """Refuse a change without the token. None: the change is allowed."""
    given = str(environ.get("HTTP_AUTHORIZATION", ""))
    if not given.startswith(_SCHEME):
        return Refusal(
            "401 Unauthorized",
            "changes need the token; `tailrace console` prints an address with it",
        )
    if not token or not hmac.compare_digest(given[len(_SCHEME) :].strip().encode(), token.encode()):
        return Refusal(
            "403 Forbidden", "the token is not this console's; run `tailrace console` for a new one"
        )
    return None


def bearer_of(environ: Mapping[str, Any]) -> str:
    """The token that a request carries in its header, "" if none."""
    given = str(environ.get("HTTP_AUTHORIZATION", ""))
    return given[len(_SCHEME) :].strip() if given.startswith(_SCHEME) else ""


def _name_of(host: str) -> str:
    """The name or address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_own_name(name: str, host_names: Collection[str]) -> bool:
    if name == "localhost" or name in host_names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
