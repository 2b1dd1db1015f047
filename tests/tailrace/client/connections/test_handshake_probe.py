"""Probes that find out why a handshake has no answer."""

from __future__ import annotations

import socket
import threading

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


def test_events_that_no_one_reads_do_not_stop_the_other_clients_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libzmq's thread would wait for room behind 2,000 of them."""
    monkeypatch.setattr(handshake_probe, "RECONNECT_MS", 1)
    broken_off = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def break_off() -> None:
            for _ in range(2_100):
                server.accept()[0].close()
            broken_off.set()

        threading.Thread(target=break_off, daemon=True).start()
        probe = begin_probe(f"tcp://127.0.0.1:{server.getsockname()[1]}", None)
        assert probe is not None
        assert broken_off.wait(60), "libzmq connects no more"
        probe.close()


def test_a_dropped_probe_is_closed_before_the_reader_of_its_events() -> None:
    """An event without a reader would stop libzmq's thread."""
    probe = HandshakeProbe("tcp://127.0.0.1:9", None)
    watched, reader = probe._socket, probe._monitor
    reader_closes = reader.close

    def close(linger: int | None = None) -> None:
        assert watched.closed
        reader_closes(linger)

    reader.__dict__["close"] = close
    del probe
    assert watched.closed
    assert reader.closed


def test_an_event_whose_reading_was_interrupted_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = HandshakeProbe(f"tcp://127.0.0.1:{server.getsockname()[1]}", None)
        for _ in range(2):  # one is the probe's look at the mechanism
            server.accept()[0].close()
        assert probe._monitor.poll(10_000)
        probe._monitor.recv()  # and not its address, which comes next
        assert probe.refusal() is None
        probe.close()
