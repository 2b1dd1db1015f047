"""Users and ACLs in the controller: its requests about them, and the feed of rights to a front.

Owner: the controller.
Invariants: a controller without users imports nothing of `user_commands`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from appliance.catalog.catalog import Catalog
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from shm.messages.lane_messages import REPLAY, LaneKind

if TYPE_CHECKING:
    from appliance.control.users.user_commands import UserCommands


class Rights:
    """The users of the catalog, read with the first request about them, or the first feed if there
    are any.
    """

    def __init__(
        self, catalog: Catalog, publisher: MetadataPublisher, wall_us: Callable[[], int]
    ) -> None:
        self._catalog = catalog
        self._publisher = publisher
        self._wall_us = wall_us
        self._commands: UserCommands | None = None

    def commands(self) -> UserCommands:
        """The handler of requests about users and ACLs."""
        if self._commands is None:
            from appliance.control.users.user_commands import UserCommands

            self._commands = UserCommands(
                self._catalog, self._publisher.publish_rights, self._wall_us
            )
        return self._commands

    def ensure_administrator(self, data_dir: str, addresses: Sequence[str]) -> None:
        """Make the first user, an administrator, if there are no users."""
        from shm.rights.server_keys import address_for_keys

        self.commands().ensure_administrator(data_dir, address_for_keys(addresses))

    def feed(self, out: LaneSender) -> None:
        """Begin the feed of a front's rights: with users, it reads them in the catalog."""
        if self._commands is not None or self._catalog.has_users():
            verifies = self._publisher.verifies_passwords(out)
            out.put(LaneKind.RIGHTS, self.commands().feed(with_credentials=verifies), flags=REPLAY)
