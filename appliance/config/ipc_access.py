"""Access to `ipc://` sockets: settings `ipc.mode` and `ipc.group` as numbers.

Invariants: the owner, who runs the appliance, always has access; no bit beyond rwx is ever set.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import digits_in

OWNER_ACCESS = 0o600
UNCHANGED = -1


class IpcAccess(NamedTuple):
    """Mode and group of the sockets."""

    mode: int
    gid: int
    """UNCHANGED: the group of the process that makes them."""


def ipc_access(mode: str, group: str) -> IpcAccess:
    """Resolve the settings.

    Raises: InvalidSettingError, also if this user may not give a socket to the group.
    """
    return IpcAccess(_mode(mode), _gid(group) if group else UNCHANGED)


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = 0
    if not OWNER_ACCESS <= mode <= 0o777 or mode & OWNER_ACCESS != OWNER_ACCESS:
        raise InvalidSettingError(
            f'ipc.mode is {text!r}; it takes an octal mode such as "0660" (owner and group), '
            '"0600" (owner) or "0666" (everybody), in which the owner may read and write'
        )
    return mode


def _gid(group: str) -> int:
    import grp  # few appliances have the setting

    try:
        number = digits_in(group)
        found = grp.getgrnam(group) if number is None else grp.getgrgid(number)
    except (KeyError, OverflowError):
        raise InvalidSettingError(
            f"ipc.group is {group!r:.100}; there is no such group: groupadd --system {group:.100}"
        ) from None
    if os.geteuid() and found.gr_gid not in (os.getegid(), *os.getgroups()):
        raise InvalidSettingError(
            f"ipc.group is {group!r}, and the user that the appliance runs as is not in it: "
            f"usermod -aG {group} tailrace, or SupplementaryGroups={group} in the unit"
        )
    return found.gr_gid
