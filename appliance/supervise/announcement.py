"""Announcement of an appliance that serves: to the log, to systemd, and to the process that started
this one.

Owner: the supervisor. It owns the pipe to that process: a line tells it that everything serves, and
the pipe's end is the sign to stop.
Invariants: made once, when every process serves. The addresses are known from then on.
"""

from __future__ import annotations

import logging
import os

import orjson

from appliance.config.settings import Settings
from appliance.supervise.sd_notify import Notifier
from shm.rights.kafka_listeners import without_protocol
from shm.tables.control import Control
from tailrace.protocol.listeners import front_address

logger = logging.getLogger("appliance.supervise.supervisor")


class Announcement:
    """See the module's docstring."""

    def __init__(self, notifier: Notifier, ready_fd: int = -1) -> None:
        """`ready_fd`: the pipe, -1: there is none."""
        self._notifier = notifier
        self.ready_fd = ready_fd
        self.is_made = False
        self.addresses: list[str] = []
        """Addresses for clients; empty until the appliance serves."""

    def take_addresses(self, settings: Settings, control: Control) -> None:
        """Learn the ports that fronts listen on. They serve."""
        self.is_made = True
        self.addresses = [
            front_address(address, front, control.port(front).load())
            for front in range(settings.fronts)
            for address in settings.listen
        ]

    def make(self, settings: Settings, control: Control, data_dir: str) -> None:
        """Announce the addresses."""
        kafka = _kafka_addresses(settings, control)
        known = ",".join(self.addresses), data_dir, os.getpid()
        if kafka:
            logger.info("ready address=%s data_dir=%s pid=%d kafka=%s", *known, ",".join(kafka))
        else:
            logger.info("ready address=%s data_dir=%s pid=%d", *known)
        self.report_ready()
        if self.ready_fd >= 0:
            os.write(
                self.ready_fd,
                orjson.dumps(
                    {"address": self.addresses[0], "addresses": self.addresses, "pid": os.getpid()}
                    | ({"kafka": kafka} if kafka else {})
                )
                + b"\n",
            )

    def report_ready(self) -> None:
        """Tell systemd, also after the settings were read again."""
        self._notifier.ready(f"serving on {', '.join(self.addresses)}")

    def has_starter_ended(self) -> bool:
        """True if the pipe's other end is closed. The line may be unread then. The pipe is
        readable.
        """
        try:
            return not os.read(self.ready_fd, 64)
        except ConnectionResetError:
            return True


def _kafka_addresses(settings: Settings, control: Control) -> list[str]:
    """Addresses for Kafka clients, HOST:PORT, with the port that stands for port 0."""
    found = [without_protocol(address) for address in settings.kafka_listen]
    if found and found[0].endswith(":0"):
        found[0] = f"{found[0].rpartition(':')[0]}:{control.port(settings.fronts).load()}"
    return found
