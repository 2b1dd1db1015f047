"""Connected clients: limits of their number, their identities, and when nothing more of a
connection will come.
"""

from __future__ import annotations

import pytest

from netfront.socket.peers.connections import ROOM_NS, SWEEP_INTERVAL_NS
from tests.kit.stepped.front_peers import LIMITS, FakeSockets, FrontPeers, connect


def test_with_all_connections_taken_the_oldest_without_a_session_makes_room(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    for fd in range(1, 11):
        connect(peers, fd, shaken=fd not in (4, 7))
    connect(peers, 11, ROOM_NS, shaken=False)
    assert sockets.closed == [4]
    peers.disconnected(4, ROOM_NS, 0)
    connect(peers, 12, ROOM_NS, shaken=False)
    assert sockets.closed == [4, 7]
    peers.disconnected(7, ROOM_NS, 0)
    peers.accepted(13, True, ROOM_NS)
    assert sockets.closed == [4, 7, 13], "others have not had the time yet: this one"


def test_a_connection_has_ended_when_what_it_had_sent_was_read(peers: FrontPeers) -> None:
    connect(peers, 1)
    peers.disconnected(1, 0, 5)
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 5) == [], "the socket has not been empty since"
    assert peers.drain_ended(0, 6) == [], "libzmq may still hand something over"
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 6) == [b"1"]
    assert not peers.has_ended


def test_a_descriptor_that_means_another_connection_ends_the_one_before(peers: FrontPeers) -> None:
    connect(peers, 1)
    assert peers.identify(b"later", 1) is peers.by_identity[b"later"]
    assert peers.drain_ended(0, 0) == [b"1"]


def test_what_a_connection_sent_before_it_ended_is_not_taken_for_its_successors(
    peers: FrontPeers,
) -> None:
    """libzmq takes messages from connections in turn: the first of one that has ended may come
    behind the first of the next one with its descriptor.
    """
    peers.accepted(5, True, 0)
    peers.disconnected(5, 0, 0)
    lives = connect(peers, 5)
    assert peers.identify(b"ended", 5) not in (None, lives)
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 1) == [b"ended"]
    assert peers.by_identity == {b"5": lives}


def test_who_was_displaced_though_it_lives_is_put_back_by_its_next_message(
    peers: FrontPeers,
) -> None:
    lives = connect(peers, 5)
    credit = lives.credit
    assert peers.identify(b"of one that is forgotten", 5) is lives
    assert lives.credit is None
    assert peers.drain_ended(0, 0) == [b"5"]
    assert peers.identify(b"5", 5) is lives
    assert lives.credit is credit
    assert peers.drain_ended(0, 0) == [b"of one that is forgotten"]


def test_without_descriptors_nobody_is_told_that_connections_max_is_too_small(
    peers: FrontPeers, sockets: FakeSockets, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure is reported where it occurs (`accept_failed`); connections that come and go
    meanwhile are no news, by the hundred.
    """
    for fd in range(4):
        connect(peers, fd)
    peers.make_room(2)
    for fd in range(50, 80):
        peers.accepted(fd, True, 0)
        assert sockets.closed.pop() == fd
        peers.disconnected(fd, 1, 1)
    assert not caplog.records
    peers.on_room_available()
    for fd in range(50, 58):
        peers.accepted(fd, True, 0)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["connections_full"]


def test_what_the_kernel_holds_is_said_of_each_tcp_connection_and_no_other(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    peers.accepted(7, True, 0)
    peers.accepted(8, False, 0)
    peers.accepted(9, True, 0)
    assert sockets.held == [7, 9]


def test_a_changed_number_of_connections_acts_on_the_next_one(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    for fd in range(1, 6):
        connect(peers, fd)
    peers.set_limits(LIMITS._replace(connections_max=5))
    peers.accepted(6, True, 0)
    assert sockets.closed == [6]
    peers.disconnected(6, 0, 0)
    peers.set_limits(LIMITS._replace(connections_max=6))
    peers.accepted(6, True, 0)
    assert sockets.closed == [6]
    assert len(peers) == 6


def test_a_connection_that_came_and_went_at_once_costs_nothing_and_its_messages_are_its_own(
    peers: FrontPeers, sockets: FakeSockets
) -> None:
    peers.came_and_went(5, 0, 0, is_counted=True)
    assert (len(peers), sockets.held) == (0, [])
    gone = peers.identify(b"gone", 5)
    assert gone is not None
    peers.accepted(5, True, 0)  # the kernel has given the descriptor to another one
    assert not peers.is_open(gone)
    peers.close(gone, "too much")
    assert not sockets.closed
    lives = peers.identify(b"lives", 5)
    assert lives is not None
    assert peers.is_open(lives)
    assert peers.drain_ended(SWEEP_INTERVAL_NS, 1) == [b"gone"]
