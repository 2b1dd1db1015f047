"""SaslHandshake, SaslAuthenticate: a client logs in.

A login that fails is answered after FAILURE_NS, and its connection is closed then, as Kafka does.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.pause import pause
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.login.errors import LoginFailedError
from netfront.kafka.wire.errors import KafkaError
from tailrace.protocol.frame import WireError

FAILURE_NS = 100_000_000
"""Kafka's connection.failed.authentication.delay.ms."""


def sasl_handshake(call: Call) -> Steps:
    """Choose a mechanism."""
    login, mechanism = call.connection.login, call.request["mechanism"]
    if login is None:
        call.connection.is_leaving = True
        return {"error_code": KafkaError.ILLEGAL_SASL_STATE, "mechanisms": []}
    if mechanism not in login.mechanisms:
        login.fail(f"the mechanism {mechanism[:40]!r} is not offered", call.services.now_ns)
        call.connection.is_leaving = True
        yield pause(call.services, FAILURE_NS)
        return {
            "error_code": KafkaError.UNSUPPORTED_SASL_MECHANISM, "mechanisms": login.mechanisms
        }  # fmt: skip
    login.begin(mechanism, is_raw=call.version == 0)
    return {"error_code": KafkaError.NONE, "mechanisms": login.mechanisms}


def sasl_authenticate(call: Call) -> Steps:
    """Take a token of the mechanism. The last one lets the client in."""
    login, services = call.connection.login, call.services
    if login is None or not login.mechanism:
        call.connection.is_leaving = True
        return _failed(KafkaError.ILLEGAL_SASL_STATE, "send SaslHandshake first")
    try:
        answer = yield from login.step(bytes(call.request["auth_bytes"]), services.now_ns)
        is_done = not login.is_under_way()
        if is_done:
            assert services.gate is not None
            assert login.claim is not None
            services.gate.admit(login.claim)
            services.let_in(call.connection)
    except (LoginFailedError, WireError) as error:
        reason = error.detail if isinstance(error, WireError) else str(error)
        login.fail(reason, services.now_ns)
        call.connection.is_leaving = True
        yield pause(services, FAILURE_NS)
        return _failed(KafkaError.SASL_AUTHENTICATION_FAILED, f"Authentication failed: {reason}")
    return {
        "error_code": KafkaError.NONE, "error_message": None, "auth_bytes": answer,
        "session_lifetime_ms": login.lifetime_ms if is_done else 0,
    }  # fmt: skip


def _failed(code: KafkaError, sentence: str) -> dict[str, Any]:
    return {
        "error_code": code, "error_message": sentence, "auth_bytes": b"", "session_lifetime_ms": 0
    }  # fmt: skip
