"""Questions of the front to the kernel about connections, on real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netfront.socket.peers.socket_stats import KernelSocketStats
from tailrace.client.connections.runtime import NEAR_SEND_BUFFER_BYTES
from tests.kit.processes import HANG_LIMIT_S


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """(A client's end, the end that a server accepted)."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), 30) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def test_bytes_are_counted_and_those_that_wait_in_the_kernel_too(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    sockets = KernelSocketStats()
    client.sendall(b"x" * 1000)
    assert accepted.recv(1, socket.MSG_PEEK)
    assert sockets.received_bytes(accepted.fileno()) == 1000
    assert sockets.waiting_bytes(accepted.fileno()) == 1000
    assert len(accepted.recv(400)) == 400
    assert sockets.received_bytes(accepted.fileno()) == 1000
    assert sockets.waiting_bytes(accepted.fileno()) == 600
    assert sockets.waiting_bytes(1 << 20) == 0, "a descriptor that is gone"
    assert sockets.received_bytes(1 << 20) == -1


def test_a_connection_is_shut_if_it_still_is_the_one_that_was_meant(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    sockets = KernelSocketStats()
    fd = accepted.fileno()
    assert not sockets.shut(fd, sockets.inode(fd) + 1), "another one has the descriptor now"
    assert not sockets.shut(1 << 20, 5)
    assert sockets.shut(fd, sockets.inode(fd))
    assert client.recv(1) == b""
    assert sockets.private_bytes() > 0, "the descriptor that `shut` borrows is its own again"


def test_the_kernel_holds_little_of_what_is_sent_within_the_host(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, accepted = pair
    assert KernelSocketStats().shrink_local_send_buffer(accepted.fileno())
    asked = min(
        NEAR_SEND_BUFFER_BYTES, int(Path("/proc/sys/net/core/wmem_max").read_text(encoding="ascii"))
    )
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * asked


def test_a_connection_of_another_address_a_unix_socket_and_one_that_is_gone_keep_what_the_kernel_chose() -> (  # noqa: E501
    None
):
    sockets = KernelSocketStats()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), 30, source_address=("127.0.0.2", 0)):
            accepted, _ = server.accept()
        with accepted:
            before = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert not sockets.shrink_local_send_buffer(accepted.fileno())
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
    one, other = socket.socketpair()
    with one, other:
        assert not sockets.shrink_local_send_buffer(one.fileno())
    with open(os.devnull, "rb") as file:
        assert not sockets.shrink_local_send_buffer(file.fileno())
    assert not sockets.shrink_local_send_buffer(1 << 20)


WITHOUT_DESCRIPTORS = """
import os, resource, socket
from netfront.socket.peers.socket_stats import KernelSocketStats
from tailrace.client.connections.runtime import NEAR_SEND_BUFFER_BYTES
from tailrace.client.connections.runtime import NEAR_SEND_BUFFER_BYTES
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname(), 30)
accepted, _ = server.accept()
sockets = KernelSocketStats()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
assert sockets.shut(accepted.fileno(), sockets.inode(accepted.fileno()))
assert client.recv(1) == b""
print("shut")
"""


def test_a_connection_is_shut_when_no_descriptor_is_left() -> None:
    """That is when connections are closed to have some again."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
        env=dict(os.environ),
    )
    assert done.stdout == "shut\n", done.stderr
