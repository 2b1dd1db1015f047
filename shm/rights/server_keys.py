"""Keys of the appliance: its server key, and the context of its own clients (console, tools).

`server.key` has the CURVE key pair that proves the appliance to its clients. `own.context` is the
context of the appliance's own clients: an account that may read it may do everything, as one that
may write in the data directory can.

Owner: the supervisor makes both at the first start with security. Fronts and console read them.

Invariants:
- Only the owner can read them. A link in their place is never followed.
- A damaged file is refused, never replaced: clients know the key that was in it.
- While a rotation lasts `server.key` has the next key beside the one in use. Fronts use a key from
  their start on, and tell it to their clients with the one that follows.
- Behind a rotation `server.key` has the public half of the former key, which a front may still use.
  Clients know it until the next rotation ends, or `forget_former`.
- Changes of `server.key` are made by its owner, under a lock on it.

Crash: a file is there whole, or is made at the next start.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
    return read_server_keys(data_dir)[0]


def read_server_keys(data_dir: str) -> list[KeyPair]:
    """The server's key pair, and its next one while a rotation lasts. Raises KeysUnusableError."""
    path = os.path.join(data_dir, SERVER_KEY_FILE)
    content = _read(path, checked_json.decode)
    if content is None and not os.path.lexists(path):
        raise KeysUnusableError(
            f"there is no {path}: name the first data directory of an appliance that has run once "
            "with users. If the file was there, bring it back from a backup"
            if os.path.isdir(data_dir)
            else f"there is no directory {data_dir}: name the data directory of the appliance"
        )
    following = None if content is None else content.get("next")
    pairs = [_pair_of(content), *([] if following is None else [_pair_of(following)])]
    if None in pairs:
        raise KeysUnusableError(
            f"{path} is damaged: bring it back from a backup. Without one move it away, and give "
            "every client a new context: the next start makes another key"
        )
    return [pair for pair in pairs if pair is not None]


def public_keys(data_dir: str) -> list[str]:
    """The public keys that clients know: the server's, its next one and its former one, if there
    are. Raises KeysUnusableError.
    """
    keys = [pair.public for pair in read_server_keys(data_dir)]
    former = _former(data_dir)
    return keys if former is None else [*keys, former]


def _former(data_dir: str) -> str | None:
    content = _read(os.path.join(data_dir, SERVER_KEY_FILE), checked_json.decode)
    former = None if content is None else content.get("former")
    return former if isinstance(former, str) and len(former) == KEY_LENGTH else None


def _pair_of(content: object) -> KeyPair | None:
    found = [content.get(name) for name in KeyPair._fields] if isinstance(content, dict) else []
    if len(found) != 2 or not all(isinstance(t, str) and len(t) == KEY_LENGTH for t in found):
        return None
    return KeyPair(*(str(text) for text in found))


def begin_rotation(data_dir: str) -> KeyPair:
    """Make the next key, and return it. Clients learn it when they connect. Raises
    KeysUnusableError, OSError, ValueError.
    """
    with _changing(data_dir):
        current, *following = read_server_keys(data_dir)
        if following:
            raise ValueError(
                f"the next key is {following[0].public} already: `tailrace server-key finish` puts "
                "it into force"
            )
        pair = new_key_pair()
        _keep(data_dir, current, pair, _former(data_dir))
        return pair


def finish_rotation(data_dir: str) -> KeyPair:
    """Make the next key the server's, and return it. Fronts use it from their next start on. Raises
    KeysUnusableError, OSError, ValueError.
    """
    with _changing(data_dir):
        current, *following = read_server_keys(data_dir)
        if not following:
            raise ValueError("there is no next key: `tailrace server-key rotate` makes it")
        _keep(data_dir, following[0], None, current.public)
        return following[0]


def forget_former(data_dir: str) -> KeyPair:
    """Tell clients the former key no more, and return the server's. Raises KeysUnusableError,
    OSError, ValueError.
    """
    with _changing(data_dir):
        current, *following = read_server_keys(data_dir)
        if _former(data_dir) is None:
            raise ValueError("clients know no former key of this appliance")
        _keep(data_dir, current, following[0] if following else None, None)
        return current


@contextmanager
def _changing(data_dir: str) -> Iterator[None]:
    """Change the keys in the block. Raises OSError, ValueError for another account than theirs."""
    from tailrace.format.directory.change_lock import changing

    read_server_keys(data_dir)  # refuses what is missing or no file
    path = os.path.join(data_dir, SERVER_KEY_FILE)
    with changing(path):
        owner = os.stat(path).st_uid
        if owner != os.geteuid():
            raise ValueError(
                f"{path} belongs to the account {owner}, which could not read it any more: run "
                "this as that account"
            )
        yield


def _keep(data_dir: str, current: KeyPair, following: KeyPair | None, former: str | None) -> None:
    content: dict[str, Any] = {"format": 1, **current._asdict()}
    if following is not None:
        content["next"] = following._asdict()
    if former is not None:
        content["former"] = former
    checked_json.replace(os.path.join(data_dir, SERVER_KEY_FILE), checked_json.encode(content))
    _update_contexts(data_dir, public_keys(data_dir))


def _update_contexts(data_dir: str, server_keys: list[str]) -> None:
    """Put the keys into the contexts of the data directory."""
    from tailrace.format.directory.change_lock import changing

    for name in (OWN_CONTEXT_FILE, ADMIN_CONTEXT_FILE):
        path = os.path.join(data_dir, name)
        with suppress(FileNotFoundError), changing(path):
            content = _read(path, _plain)
            if content is not None:
                _write(path, {**content, "server_keys": server_keys})


class AnnouncedKeys:
    """The public keys that a front tells its clients: those of the file, at which it looks with
    each call, and the one that it uses. All fronts tell them in the same order.
    """

    def __init__(self, data_dir: str, used: str) -> None:
        """`used`: public key of this front."""
        self._data_dir = data_dir
        self._path = os.path.join(data_dir, SERVER_KEY_FILE)
        self._used = used
        self._seen: tuple[int, int] | None = None
        self._keys = [used]

    def __call__(self) -> list[str]:
        try:
            found = os.stat(self._path)
            seen = found.st_mtime_ns, found.st_ino
            if seen != self._seen:
                self._keys = list(dict.fromkeys([*public_keys(self._data_dir), self._used]))
                self._seen = seen
        except (OSError, KeysUnusableError):
            pass  # the last known ones
        return self._keys


def own_public_key(data_dir: str) -> str:
    """Public key of the appliance's own clients. Raises KeysUnusableError."""
    path = os.path.join(data_dir, OWN_CONTEXT_FILE)
    found = _own_of(path, read_server_key(data_dir).public)
    if found is None:
        raise KeysUnusableError(f"{path} is missing or damaged: a start makes it again")
    return found


def _own_of(path: str, server_public: str) -> str | None:
    content = _read(path, _plain)
    known = None if content is None else content.get("server_keys")
    if content is None or not isinstance(known, list) or server_public not in known:
        return None
    public = content.get("public_key")
    return public if isinstance(public, str) and len(public) == KEY_LENGTH else None


def write_context(path: str, user: str, address: str, server_public: str, pair: KeyPair) -> None:
    """Write a context, for its owner alone. Raises OSError."""
    content = {
        "format": 1, "user": user, "bootstrap": address, "server_keys": [server_public],
        "public_key": pair.public, "secret_key": pair.secret,
    }  # fmt: skip
    _write(path, content)


def _write(path: str, content: dict[str, Any]) -> None:
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
    """The content of a file that only its owner may read; None if it is missing or damaged. Raises
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
