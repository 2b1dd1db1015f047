"""A signal's handler raises at each point of a handshake's probe: the reader of its events stays
open until libzmq has none. Without it libzmq's thread, and every client, would wait for ever.
"""

from __future__ import annotations

import gc
import socket

import pytest
import zmq

from tailrace.client.connections import handshake_probe
from tailrace.client.connections.refused_handshakes import RefusedHandshakes
from tests.conformance.interrupts import at, points

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""


def test_an_interrupt_leaves_no_events_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, zmq.Socket[bytes]] = {}
    make = zmq.Context.socket

    def noting(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        made[kind] = make(context, kind)
        return made[kind]

    monkeypatch.setattr(zmq.Context, "socket", noting)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for point in points():
            handshakes = RefusedHandshakes(address, has_probes=True)
            with at(point) as interruption:
                handshakes.refusal(1)
                handshakes.refusal(2)
                handshakes.end_probe()
            del handshakes
            gc.collect()
            is_watched = zmq.DEALER in made and not made[zmq.DEALER].closed
            has_reader = zmq.PAIR in made and not made[zmq.PAIR].closed
            assert has_reader or not is_watched, interruption.where
            for number in list(handshake_probe._watched):  # its finalizer was interrupted
                handshake_probe._close(number, handshake_probe.MechanismPeek(""))
            for each in made.values():
                each.close(0)
            made.clear()
            if not interruption.was_made:
                return
