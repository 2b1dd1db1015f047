"""Secrets that the service manager gives the appliance: files in `$CREDENTIALS_DIRECTORY`.

systemd makes them from the unit's `LoadCredential=`, in memory that is not swapped, readable by the
service alone. A container may mount a directory of secrets and set the variable.

Owner: the service manager. The appliance only reads.

Invariants:
- A credential that is there is used. One that cannot be read is an error, not a missing one.
- A directory that the service may not enter has no credentials. systemd leaves such a one where it
  could not mount any, as in a container whose root is private.
"""

from __future__ import annotations

import os

VARIABLE = "CREDENTIALS_DIRECTORY"
PREFIX = "credential:"
"""Begin of the path of a key file that names a credential instead."""
BYTES_MAX = 64 << 10


def credential_path(setting: str) -> str:
    """The path of a setting that names a file, or `credential:NAME` of the service manager's."""
    if not setting.startswith(PREFIX):
        return setting
    return os.path.join(os.environ.get(VARIABLE, ""), setting.removeprefix(PREFIX))


def named_credential(path: str) -> bytes | None:
    """The secret of `credential:NAME`; None: the path is that of a file. Raises OSError."""
    if not path.startswith(PREFIX):
        return None
    found = credential(path.removeprefix(PREFIX))
    if found is None:
        raise OSError(f"there is no {path}; add LoadCredential= to the unit")
    return found


def credential(name: str) -> bytes | None:
    """The secret of this name; None: none was given. Raises OSError."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return None
    path = os.path.join(directory, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except PermissionError:
        if os.access(directory, os.X_OK):
            raise
        return None
    with os.fdopen(fd, "rb") as file:
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(f"credential {path} has more than {BYTES_MAX} bytes; give a shorter one")
    return content
