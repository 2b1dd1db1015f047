"""Probes that find out why a handshake has no answer."""

from __future__ import annotations

import pytest
import zmq

from tailrace.client.connections import handshake_probe
from tailrace.client.connections.handshake_probe import HandshakeProbe, begin_probe


def test_probes_that_follow_each_other_at_once_have_names_of_their_own() -> None:
    for _ in range(200):
        probe = begin_probe("tcp://127.0.0.1:9", None)
        assert probe is not None
        probe.close()


def test_a_probe_that_cannot_be_begun_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unclosed sockets are warnings, which are errors here."""

    def refuse(*_: object) -> None:
        raise zmq.ZMQError(zmq.EINVAL)

    monkeypatch.setattr(handshake_probe, "set_credentials", refuse)
    with pytest.raises(zmq.ZMQError):
        HandshakeProbe("tcp://127.0.0.1:9", object())  # type: ignore[arg-type]
    assert begin_probe("tcp://127.0.0.1:9", object()) is None  # type: ignore[arg-type]
