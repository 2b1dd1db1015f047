"""Another host, as far as a program can tell: a network namespace with a link to this one, and no
sight of this host's data. Making it needs root.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def can_be_made() -> bool:
    """True if this machine lets the test make one."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"tr-{os.urandom(3).hex()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


class OtherHost:
    """See the module's docstring."""

    def __init__(self, name: str, gateway: str, link: str) -> None:
        self._name = name
        self.gateway = gateway
        """This host's address, as the other one sees it."""
        self._link = link

    def run(
        self, command: list[str], hidden: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """A program there, which finds the directory `hidden` empty."""
        script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        whole = [
            "ip",
            "netns",
            "exec",
            self._name,
            "unshare",
            "-m",
            "sh",
            "-c",
            script,
            hidden,
            *command,
        ]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s, check=False)

    def sent_bytes(self) -> int:
        """Number of bytes that went there so far."""
        return int(pathlib.Path(f"/sys/class/net/{self._link}/statistics/tx_bytes").read_text())


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """One for the block."""
    token = os.urandom(3)
    name, link, far = f"tr-{token.hex()}", f"tr{token.hex()}a", f"tr{token.hex()}b"
    gateway, address = (f"10.{200 + token[0] % 50}.{token[1]}.{number}" for number in (1, 2))

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", f"{gateway}/30", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "addr", "add", f"{address}/30", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield OtherHost(name, gateway, link)
    finally:
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        ip("netns", "del", name)
