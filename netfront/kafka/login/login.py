"""Login: the user of one connection, proven by SASL, again when its time is over.

Owner: one gateway.

Invariants:
- A connection has a claim only after a whole exchange that proved it, and the claim says by which
  credential.
- An unknown user and a wrong password are told alike, after the same time.
- Who logs in again stays the same user.

Source: Kafka's SASL (KIP-43, KIP-152), SCRAM (KIP-84), OAUTHBEARER (KIP-255), re-authentication
(KIP-368).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from netfront.access.gate import Gate
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.login.errors import LoginFailedError
from netfront.kafka.login.failure_limit import FailureLimit
from netfront.kafka.login.password_checks import PasswordChecks
from netfront.kafka.login.scram_exchange import ScramExchange
from netfront.kafka.login.token_checks import TokenChecks
from netfront.socket.zap import TOKEN, Claim
from shm.rights.bearer_tokens import TokenError
from shm.rights.scram import HASHES, SHA_256, SHA_512, ScramCredential

logger = logging.getLogger(__name__)

PLAIN, OAUTHBEARER = "PLAIN", "OAUTHBEARER"
MECHANISMS = (SHA_512, SHA_256, OAUTHBEARER, PLAIN)
"""The mechanisms, the preferred one first."""
READABLE = (OAUTHBEARER, PLAIN)
"""Mechanisms that send what lets everybody in who reads it."""
TOKEN_MAX_BYTES = 16 << 10
NAME_SHOWN_MAX = 100
"""Characters of a name that are logged, as in the audit log."""
REFUSED = "the user is unknown or the password is wrong"
Exchange = Any


class Logins:
    """The logins of one gateway."""

    def __init__(
        self,
        gate: Gate,
        checks: PasswordChecks,
        secret: bytes,
        settings: dict[str, Any],
        on_failed: Callable[[str, str, str], None] = lambda _user, _address, _reason: None,
        tokens: TokenChecks | None = None,
    ) -> None:
        """`secret`: the appliance's. `settings` are read at each login. `on_failed` gets the name
        that was given, the address and the reason of each login that fails. `tokens` checks those
        of OAUTHBEARER.
        """
        self.gate = gate
        self.checks = checks
        self.tokens = tokens
        self.on_failed = on_failed
        self.failures = FailureLimit()
        self._secret = secret
        self._settings = settings

    def mechanisms(self, *, has_tls: bool) -> list[str]:
        """The mechanisms of a connection."""
        allowed: Sequence[str] = self._settings["kafka.sasl.enabled.mechanisms"]
        may_be_read = has_tls or self._settings["kafka.sasl.plain_without_tls"]
        return [
            name
            for name in MECHANISMS
            if name in allowed
            and (name not in READABLE or may_be_read)
            and (name != OAUTHBEARER or (self.tokens is not None and self.tokens.can_verify))
        ]

    @property
    def lifetime_ms(self) -> int:
        """Time after which a client must log in again; 0: never."""
        return int(self._settings["kafka.connections.max.reauth.ms"])

    def login(self, host: str, *, has_tls: bool) -> Login:
        """The login of a new connection."""
        return Login(self, host, has_tls=has_tls)

    def scram(self, mechanism: str) -> ScramExchange:
        """A new exchange."""
        return ScramExchange(
            mechanism, self._credential, self._secret, os.urandom(18).hex(),
            self.gate.scram_shapes(mechanism),
        )  # fmt: skip

    def _credential(self, name: str, mechanism: str) -> ScramCredential | None:
        user = self.gate.user(name)
        return None if user is None else user.scram_of(mechanism)


class Login:
    """The login of one connection."""

    def __init__(self, logins: Logins, host: str, *, has_tls: bool) -> None:
        self._logins = logins
        self._host = host
        self._has_tls = has_tls
        self.claim: Claim | None = None
        """None: nobody has logged in."""
        self.mechanism = ""
        """The mechanism of the exchange that is under way, "": there is none."""
        self.is_raw = False
        """True while the client's tokens have no frame of Kafka's around them (SaslHandshake 0)."""
        self.expires_at_ns = 0
        """Time until which the client may send requests without another login. 0: always."""
        self.user = ""
        """Name that the exchange is about, as far as it is known."""
        self.lifetime_ms = 0
        """Time that the last login is good for, as the client is told; 0: for ever."""
        self._scram: ScramExchange | None = None

    @property
    def mechanisms(self) -> list[str]:
        """The mechanisms that are offered now."""
        return self._logins.mechanisms(has_tls=self._has_tls)

    def is_under_way(self) -> bool:
        """True between a handshake and the end of its exchange."""
        return bool(self.mechanism)

    def begin(self, mechanism: str, *, is_raw: bool) -> None:
        """Begin an exchange."""
        self.mechanism, self.is_raw, self.user = mechanism, is_raw, ""
        self._scram = self._logins.scram(mechanism) if mechanism in HASHES else None

    def step(self, token: bytes, now_ns: int) -> Steps:
        """Take a token of the client. Returns the token to answer with. Raises LoginFailedError."""
        if len(token) > TOKEN_MAX_BYTES:
            raise LoginFailedError(f"a token of {self.mechanism} is too large")
        if self._scram is not None:
            answer = self._scram.step(token)
            self.user = self._scram.user
            if self._scram.is_done:
                credential = self._scram.credential
                assert credential is not None
                self._prove(credential.stored_key.hex(), now_ns)
            return answer
        if self.mechanism == OAUTHBEARER:
            self._prove(TOKEN, now_ns, self._check_token(token))
            return b""
        stored = yield from self._check_plain(token)
        self._prove(stored, now_ns)
        return b""

    def _check_plain(self, token: bytes) -> Steps:
        """Returns the hash of the user's password. Raises LoginFailedError."""
        parts = token.split(b"\0")
        try:
            authorized, self.user, password = (part.decode("utf-8") for part in parts)
        except ValueError:
            raise LoginFailedError("the token of PLAIN is malformed") from None
        if authorized not in ("", self.user):
            raise LoginFailedError("a client cannot act as another user")
        user = self._logins.gate.user(self.user)
        stored = "" if user is None else user.password_hash
        checks = self._logins.checks
        waiter = checks.check(self.user, password, stored, self._host)
        try:
            is_right = yield waiter
        finally:
            checks.forget(waiter)
        if not is_right:
            raise LoginFailedError(REFUSED)
        return stored

    def _check_token(self, token: bytes) -> int:
        """Take the user of a token. Returns for how many ms it is accepted. Raises
        LoginFailedError.
        """
        tokens = self._logins.tokens
        assert tokens is not None
        try:
            acts_as, proven, lifetime_ms = tokens.check(token)
        except TokenError as error:
            raise LoginFailedError(str(error)) from None
        self.user = proven
        if acts_as not in ("", proven):
            raise LoginFailedError("a client cannot act as another user")
        return lifetime_ms

    def _prove(self, credential: str, now_ns: int, lifetime_ms: int = 0) -> None:
        """Take the user as proven, for `lifetime_ms` at most (0: without an end)."""
        if self.claim is not None and self.claim.user != self.user:
            raise LoginFailedError(f"this connection belongs to user {self.claim.user!r}")
        self.claim = Claim(b"", -1, self._host, self.user, credential)
        limits = (lifetime_ms, self._logins.lifetime_ms)
        self.lifetime_ms = min((limit for limit in limits if limit), default=0)
        self.expires_at_ns = now_ns + self.lifetime_ms * 1_000_000 if self.lifetime_ms else 0
        self.mechanism, self.is_raw, self._scram = "", False, None

    def fail(self, reason: str, now_ns: int) -> None:
        """Note that the exchange has failed. The log has a host's first failures of a minute."""
        unnamed = self._logins.failures.note(self._host, now_ns)
        if unnamed is not None:
            logger.warning(
                "kafka_login_failed user=%r host=%s reason=%r unnamed=%s",
                self.user[:NAME_SHOWN_MAX], self._host, reason, unnamed,
            )  # fmt: skip
        self._logins.on_failed(self.user, self._host, reason)
        self.mechanism, self._scram = "", None
