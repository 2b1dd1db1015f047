"""Keys of the appliance: its server key, and the context of its own clients (console, tools).

`server.key` has the CURVE key pair that proves the appliance to its clients. `own.context` is the
context of the appliance's own clients: whoever may read it may do everything, as whoever may write
in the data directory can.

Owner: the supervisor makes both at the first start with security. Fronts and console read them.

Invariants:
- Only the owner can read them. A link in their place is never followed.
- A damaged file is refused, never replaced: clients know the key that was in it.

Crash: a file is there whole, or is made at the next start.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from tailrace.format.directory import checked_json

SERVER_KEY_FILE = "server.key"
OWN_CONTEXT_FILE = "own.context"
ADMIN_CONTEXT_FILE = "admin.context"
KEY_LENGTH = 40


class KeysUnusableError(RuntimeError):
    """A file with a key is damaged, or others may read it."""


class KeyPair(NamedTuple):
    """A CURVE key pair, Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<key pair {self.public}>"


def new_key_pair() -> KeyPair:
    """A new key pair."""
    import zmq  # the supervisor needs it at the first start only

    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def ensure_keys(data_dir: str, address: str) -> None:
    """Make the keys that are missing. `address`: of the appliance, for its own clients. Raises
    KeysUnusableError, OSError.
    """
    path = os.path.join(data_dir, SERVER_KEY_FILE)
    if not os.path.lexists(path):
        pair = new_key_pair()
        checked_json.replace(
            path, checked_json.encode({"format": 1, "public": pair.public, "secret": pair.secret})
        )
    server = read_server_key(data_dir)
    own = os.path.join(data_dir, OWN_CONTEXT_FILE)
    if _own_of(own, server.public) is None:
        write_context(own, "appliance", near_address(address), server.public, new_key_pair())


def read_server_key(data_dir: str) -> KeyPair:
    """The server's key pair. Raises KeysUnusableError."""
    path = os.path.join(data_dir, SERVER_KEY_FILE)
    content = _read(path, checked_json.decode)
    found = [content.get(name) for name in ("public", "secret")] if content else []
    if len(found) != 2 or not all(isinstance(t, str) and len(t) == KEY_LENGTH for t in found):
        raise KeysUnusableError(
            f"{path} is damaged: bring it back from a backup. Without one move it away, and give "
            "every client a new context: the next start makes another key"
        )
    return KeyPair(*(str(text) for text in found))


def own_public_key(data_dir: str) -> str:
    """Public key of the appliance's own clients. Raises KeysUnusableError."""
    path = os.path.join(data_dir, OWN_CONTEXT_FILE)
    found = _own_of(path, read_server_key(data_dir).public)
    if found is None:
        raise KeysUnusableError(f"{path} is missing or damaged: a start makes it again")
    return found


def _own_of(path: str, server_public: str) -> str | None:
    content = _read(path, _plain)
    if content is None or content.get("server_keys") != [server_public]:
        return None
    public = content.get("public_key")
    return public if isinstance(public, str) and len(public) == KEY_LENGTH else None


def write_context(path: str, user: str, address: str, server_public: str, pair: KeyPair) -> None:
    """Write a context, for its owner alone. Raises OSError."""
    content = {
        "format": 1, "user": user, "bootstrap": address, "server_keys": [server_public],
        "public_key": pair.public, "secret_key": pair.secret,
    }  # fmt: skip
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    checked_json.replace(path, orjson.dumps(content, option=options))


def ensure_admin_key(data_dir: str, address: str) -> tuple[str, str]:
    """The public key of the first administrator, and the path of its context, which is made if
    there is none. Raises KeysUnusableError, OSError.
    """
    path = os.path.join(data_dir, ADMIN_CONTEXT_FILE)
    server = read_server_key(data_dir)
    public = _own_of(path, server.public)
    if public is None:
        pair = new_key_pair()
        write_context(path, "admin", near_address(address), server.public, pair)
        public = pair.public
    return public, path


def address_for_keys(addresses: Sequence[str]) -> str:
    """The address that goes into a context, of those to listen on: the first one over TCP. A key
    has no meaning over a Unix socket, where the account of the process counts.
    """
    return next((address for address in addresses if address.startswith("tcp://")), addresses[0])


def near_address(address: str) -> str:
    """The address for clients on this host, of one to listen on."""
    return (
        address.replace("//*:", "//127.0.0.1:")
        .replace("//0.0.0.0:", "//127.0.0.1:")
        .replace("//[::]:", "//[::1]:")
    )


def _plain(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _read(path: str, decode: Any) -> dict[str, Any] | None:
    """The content of a file that nobody else may read; None if it is missing or damaged. Raises
    KeysUnusableError.
    """
    try:
        data = checked_json.read(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeysUnusableError(f"{path} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise KeysUnusableError(
            f"others may read {path} (mode {mode:04o}), and with it a secret key: run `chmod 600 "
            f"{path}`, and replace the key if somebody may have read it"
        )
    content = decode(data)
    return content if isinstance(content, dict) else None
