"""Contexts: an address with what proves who connects, in one file or under a name.

`context:NAME` or `context:PATH` is an address that every client takes. `#ADDRESS` behind it
replaces the context's address. A file of `tailrace user add NAME --out FILE` is a context; contexts
under names are in one file of the user's configuration directory (`tailrace context add`). The
appliance's own console has `?acting-for=JSON` behind the path, for the user of its page whom the
connection acts for; the front believes it of nobody else.

While the appliance rotates its key, its clients learn the next one at their handshakes, and keep it
in their context.

Owner: the user's own commands write contexts; a client replaces the server keys in its own one.

Invariants:
- A file that others may read is refused, as ssh does.
- Server keys are learned from an appliance that has proven one of those that are known.
- A client replaces a file of its own account alone, under a lock, which the commands take too, and
  only the file that it has read.
- Neither a message nor a representation has the secret key.

    {"format": 1, "user": "a", "bootstrap": "tcp://10.0.0.5:7420",
     "server_keys": ["..."], "public_key": "...", "secret_key": "..."}
"""

from __future__ import annotations

import os
import stat
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from tailrace.core.errors import InvalidSettingError
from tailrace.format.directory.change_lock import changing

SCHEME = "context:"
FORMAT = 1
FILE_MAX_BYTES = 1 << 20
KEY_LENGTH = 40
_ACTING_FOR = "?acting-for="


class Credentials(NamedTuple):
    """The keys of a connection, Z85."""

    server_keys: tuple[str, ...]
    """The appliance's public keys. The second one is its next one."""
    public_key: str
    secret_key: str
    user: str = ""
    path: str = ""
    """Path of the file that they are from."""
    name: str = ""
    """Name of the context in a file of several."""

    def __repr__(self) -> str:
        return f"<credentials of {self.user}>"


class Target(NamedTuple):
    """The address that a context stands for."""

    address: str
    credentials: Credentials | None
    acting_for: str = ""
    """JSON of the user whom the appliance's own client acts for. Empty: for itself."""


def acting_address(address: str, acting_for: Mapping[str, str]) -> str:
    """The address of a context, for a client of the appliance's own that acts for a user."""
    name, _, behind = address.partition("#")
    quoted = urllib.parse.quote(orjson.dumps(acting_for), safe="")
    return f"{name}{_ACTING_FOR}{quoted}#{behind}"


def contexts_path() -> str:
    """Path of the file of contexts under names, which need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification asks
        base = os.path.expanduser("~/.config")
    return os.path.join(base, "tailrace", "contexts.json")


def resolve(text: str) -> Target:
    """The address and keys of `context:NAME`, `context:PATH`, with `#ADDRESS` or without. Raises
    InvalidSettingError.
    """
    name, _, address = text.removeprefix(SCHEME).partition("#")
    name, _, quoted = name.partition(_ACTING_FOR)
    acting_for = urllib.parse.unquote(quoted)
    if os.sep in name or name.endswith(".context"):
        path, content = name, _read(name)
    else:
        path = contexts_path()
        known = _read(path).get("contexts")
        found = known.get(name) if isinstance(known, dict) else None
        if not isinstance(found, dict):
            raise InvalidSettingError(
                f"there is no context {name[:100]!r} in {path}; `tailrace context list` shows them"
            )
        content = found
    address = address or content.get("bootstrap", "")
    if not isinstance(address, str) or not address.startswith(("tcp://", "ipc://")):
        raise InvalidSettingError(f"the context {name[:100]!r} in {path} has no address")
    found_keys = _credentials(content, name, path)
    if found_keys is None:
        return Target(address, None, acting_for)
    found_keys = found_keys._replace(path=path, name="" if path == name else name)
    _stored[found_keys.public_key] = found_keys.server_keys
    learned = _unstored.get(found_keys.public_key, ())
    if set(learned) & set(found_keys.server_keys):
        server_keys = tuple(dict.fromkeys((*learned, *found_keys.server_keys)))
        found_keys = found_keys._replace(server_keys=server_keys)
    return Target(address, found_keys, acting_for)


STORE_WAIT_S = 0.5
"""A client waits this long for the lock. The next handshake tries again."""
_stored: dict[str, tuple[str, ...]] = {}
"""Server keys by public key of the client, as its context has them."""
_unstored: dict[str, tuple[str, ...]] = {}
"""Those whose context could not be written."""


def learn(credentials: Credentials, server_keys: tuple[str, ...]) -> Credentials:
    """The credentials with the server keys that the appliance has told, which are kept in their
    context if it can be written.
    """
    if not server_keys or not all(len(key) == KEY_LENGTH for key in server_keys):
        return credentials
    own = credentials.public_key
    are_known = set(server_keys) == set(credentials.server_keys)
    is_stored = _stored.get(own) == server_keys and own not in _unstored
    if are_known and is_stored:
        return credentials
    try:
        _store(credentials._replace(server_keys=server_keys))
        _stored[own] = server_keys
        _unstored.pop(own, None)
    except (OSError, InvalidSettingError):
        _stored.pop(own, None)
        _unstored[own] = server_keys
    if are_known:
        return credentials  # the key that was proven stays the first one
    return credentials._replace(server_keys=server_keys)


def _store(credentials: Credentials) -> None:
    """Replace the server keys in the file of a context. Raises OSError, InvalidSettingError."""
    if not credentials.path:
        raise FileNotFoundError("the keys are from no context")
    path = os.path.realpath(credentials.path)
    if os.stat(path).st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another account")
    with changing(path, STORE_WAIT_S):
        _replace_keys(path, credentials)


def _replace_keys(path: str, credentials: Credentials) -> None:
    before = os.stat(path)
    content = _read(path)
    contexts = content.get("contexts")
    own = contexts.get(credentials.name) if credentials.name and contexts else content
    if not isinstance(own, dict) or own.get("public_key") != credentials.public_key:
        return  # another one by now
    if own.get("server_keys") == list(credentials.server_keys):
        return
    own["server_keys"] = list(credentials.server_keys)
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # left by a killed process; the lock is held
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(fd)
        now = os.stat(path)
        if (now.st_dev, now.st_ino, now.st_uid) != (before.st_dev, before.st_ino, os.geteuid()):
            raise FileExistsError(f"{path} was replaced by a program that takes no lock")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _credentials(content: dict[str, Any], name: str, path: str) -> Credentials | None:
    if "secret_key" not in content:
        return None
    keys = content.get("server_keys")
    texts = [content["secret_key"], content.get("public_key")]
    texts += keys if isinstance(keys, list) and keys else [None]
    if not all(isinstance(text, str) and len(text) == KEY_LENGTH for text in texts):
        raise InvalidSettingError(
            f"the context {name[:100]!r} in {path} is damaged: a key is missing, or is no key; "
            "make another with `tailrace user add`"
        )
    return Credentials(
        tuple(texts[2:]), content["public_key"], content["secret_key"], str(content.get("user", ""))
    )


def _read(path: str) -> dict[str, Any]:
    """The content of a file of contexts. Raises InvalidSettingError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidSettingError(f"the context {path} is no regular file")
            data = file.read(FILE_MAX_BYTES)
    except OSError as error:
        raise InvalidSettingError(
            f"the context {path} cannot be read: {error.strerror}; `tailrace user add NAME --out "
            "FILE` makes one"
        ) from None
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidSettingError(
            f"{path} is no context of this version; `tailrace user add NAME --out FILE` makes one"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidSettingError(
            f"others may read the context {path} (mode {stat.S_IMODE(found.st_mode):04o}), and "
            f"with it the secret key: run `chmod 600 {path}`"
        )
    return content
