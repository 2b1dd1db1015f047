"""Peers that are closed a little later: who is, and who is not."""

from __future__ import annotations

import pytest

from netfront.socket.peers.connections import SWEEP_INTERVAL_NS
from tests.kit.stepped.front_peers import FakeSockets, FrontPeers


@pytest.mark.parametrize("sender", [b"gone", b"connected"])
def test_who_has_the_descriptor_of_an_ended_connection_is_closed_only_for_its_own_messages(
    peers: FrontPeers, sockets: FakeSockets, sender: bytes
) -> None:
    """Messages of a connection that has ended are read when its successor has sent nothing yet, and
    are taken for its successor's. libzmq tells which of them it was.
    """
    peers.accepted(5, True, 0)
    peers.disconnected(5, 1, 1)
    peers.accepted(5, True, 2)
    successor = peers.identify(sender, 5)
    assert successor is not None
    assert not peers.is_sender(successor)
    peers.condemned.condemn(sender, "nonsense")
    for turn in range(1, 3):
        peers.sweep(turn * SWEEP_INTERVAL_NS)
        assert not peers.is_settled, "sweeps go on until it is known"
    peers.drain_ended(2 * SWEEP_INTERVAL_NS, 2)
    assert peers.is_sender(successor)
    for turn in range(3, 5):
        peers.sweep(turn * SWEEP_INTERVAL_NS)
        assert sockets.closed == [], "what it was sent has no time to leave"
    peers.sweep(5 * SWEEP_INTERVAL_NS)
    assert sockets.closed == ([] if sender == b"gone" else [5])
    assert peers.is_settled


def test_a_sender_that_was_taken_for_an_ended_connection_is_closed_when_that_is_read(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    peers.accepted(5, True, 0)
    assert peers.identify(b"first", 5) is not None
    peers.disconnected(5, 1, 1)
    peers.accepted(5, True, 2)
    peers.disconnected(5, 3, 1)
    peers.accepted(5, True, 4)
    assert peers.identify(b"innocent", 5) is not None
    taken_for = peers.identify(b"gone", 5)
    assert taken_for is not None
    assert not peers.is_open(taken_for)
    peers.condemned.condemn(b"gone", "nonsense")
    assert b"gone" in peers.drain_ended(2 * SWEEP_INTERVAL_NS, 2)
    for turn in range(3, 7):
        peers.sweep(turn * SWEEP_INTERVAL_NS)
    assert sockets.closed == [], "the open connection is another's"
    assert peers.is_settled


def test_a_sender_whose_place_a_late_message_of_an_ended_connection_took_is_closed(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    peers.accepted(5, True, 0)
    peers.disconnected(5, 1, 1)
    peers.accepted(5, True, 2)
    late = peers.identify(b"late", 5)
    assert late is not None
    assert peers.is_open(late), "its message is read behind the start of its successor"
    taken_for = peers.identify(b"connected", 5)
    assert taken_for is not None
    assert not peers.is_open(taken_for)
    peers.condemned.condemn(b"connected", "nonsense")
    peers.drain_ended(2 * SWEEP_INTERVAL_NS, 2)
    for turn in range(3, 6):
        assert sockets.closed == []
        peers.sweep(turn * SWEEP_INTERVAL_NS)
    assert sockets.closed == [5]
    assert peers.is_settled
