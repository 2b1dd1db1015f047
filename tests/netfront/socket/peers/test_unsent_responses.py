"""Responses that wait for a peer: which buffers are free again."""

from __future__ import annotations

from tests.kit.stepped.front_peers import MIB, FakeMark, FrontPeers, connect


def test_buffers_come_back_in_any_order_over_connections(peers: FrontPeers) -> None:
    frozen, reader = connect(peers, 1), connect(peers, 2)
    first, second = FakeMark(), FakeMark()
    for peer, mark in ((frozen, first), (reader, second)):
        peers.unsent.needs_mark(peer, MIB)
        peers.unsent.mark(peer, mark, bytearray(peer.fd), 0)
    second.done = True
    assert peers.unsent.settle_some(4, 0) == [bytearray(2)]
    first.done = True
    assert peers.unsent.settle_some(4, 0) == [bytearray(1)]
