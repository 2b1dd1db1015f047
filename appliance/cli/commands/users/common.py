"""Options and parts that the commands for users share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import orjson

from appliance.cli.options.shared import bootstrap_option, connect
from tailrace.admin.users import UserAdmin
from tailrace.client.connections.credentials import FORMAT, SCHEME, resolve
from tailrace.core.errors import InvalidRequestError, InvalidSettingError

Function = TypeVar("Function", bound=Callable[..., Any])


def place_options(function: Function) -> Function:
    """Add --bootstrap and --data-dir."""
    option = click.option(
        "--data-dir",
        metavar="DIR",
        help="Work on this data directory, as its owner: through the appliance that serves it, or "
        "on its files if none does.",
    )
    return option(bootstrap_option(function))


@contextmanager
def users_at(bootstrap: str, data_dir: str | None) -> Iterator[UserAdmin]:
    """The users of an appliance, or of a data directory. Raises TailraceError, ClickException."""
    if data_dir is None:
        with connect(bootstrap) as admin:
            yield admin
        return
    address = served_at(data_dir)
    if address is not None:
        with connect(address) as admin:
            yield admin
        return
    from appliance.control.users.offline_users import offline_users  # SQLite and the lock
    from appliance.data.directory_errors import DataDirectoryError

    try:
        with offline_users(data_dir) as users:
            yield users
    except DataDirectoryError as error:
        raise click.ClickException(str(error)) from None


def password_options(function: Function) -> Function:
    """Add --password, --password-file and --password-stdin. A password is no argument: other users
    of the host see those.
    """
    for option in (
        click.option(
            "--password-stdin", is_flag=True, help="The password is the first line of the input."
        ),
        click.option(
            "--password-file", metavar="FILE", help="The password is the first line of the file."
        ),
        click.option(
            "--password", "asks_password", is_flag=True, help="Ask for the password, without echo."
        ),
    ):
        function = option(function)
    return function


def given_password(asks: bool, path: str | None, stdin: bool) -> str | None:
    """The password that the options give, None if there is none. Raises ClickException."""
    if asks + bool(path) + stdin > 1:
        raise click.UsageError("give one of --password, --password-file and --password-stdin")
    if asks:
        if not _has_terminal():
            raise click.UsageError(
                "there is no terminal to ask for the password on: give --password-stdin or "
                "--password-file"
            )
        return str(click.prompt("Password", hide_input=True, confirmation_prompt=True))
    if stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                return file.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"{path} cannot be read: {error}") from None
    return None


def _has_terminal() -> bool:
    """True where a password can be asked for without echo."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return sys.stdin.isatty()
    return True


def password_fields(password: str) -> dict[str, Any]:
    """The fields that the appliance stores for a password. Raises ClickException."""
    from shm.rights.passwords import PasswordsMissingError, fields_of  # argon2

    try:
        return fields_of(password)
    except (PasswordsMissingError, InvalidRequestError) as error:
        raise click.ClickException(str(error)) from None


def served_at(data_dir: str) -> str | None:
    """The address of the appliance that serves a data directory, for its owner. None: none does."""
    from shm.rights.server_keys import OWN_CONTEXT_FILE, address_for_keys, near_address
    from tailrace.format.directory import checked_json
    from tailrace.format.directory.data_dir import LOCK_FILE

    try:
        content = checked_json.decode(checked_json.read(os.path.join(data_dir, LOCK_FILE)))
    except OSError:
        return None
    addresses = content.get("addresses") if isinstance(content, dict) else None
    if not addresses or not isinstance(addresses, list):
        return None
    address = near_address(address_for_keys([str(address) for address in addresses]))
    own = os.path.join(os.path.abspath(data_dir), OWN_CONTEXT_FILE)
    return f"{SCHEME}{own}#{address}" if os.path.exists(own) else address


def server_of(bootstrap: str, data_dir: str | None, *, makes: bool = True) -> tuple[str, list[str]]:
    """The address and the public server keys that a new context gets. `makes`: a data directory
    without keys gets some. Raises ClickException.
    """
    if data_dir is not None:
        from shm.rights.server_keys import (
            SERVER_KEY_FILE,
            KeysUnusableError,
            ensure_keys,
            near_address,
            public_keys,
        )

        try:
            if makes and not os.path.lexists(os.path.join(data_dir, SERVER_KEY_FILE)):
                ensure_keys(data_dir, "tcp://127.0.0.1:7420")
            own = resolve(f"{SCHEME}{os.path.abspath(data_dir)}/own.context")
            return near_address(own.address), public_keys(data_dir)
        except (KeysUnusableError, OSError, InvalidSettingError) as error:
            raise click.ClickException(str(error)) from None
    if bootstrap.startswith(SCHEME):
        target = resolve(bootstrap)
        if target.credentials is not None:
            return target.address, list(target.credentials.server_keys)
    raise click.ClickException(
        f"{bootstrap} has no server key to put into a context: use a context of an administrator, "
        "or --data-dir DIR on the appliance's host"
    )


def write_new_context(path: str, content: dict[str, Any]) -> None:
    """Write a context that its owner alone can read. Raises ClickException if the file exists."""
    data = orjson.dumps(
        {"format": FORMAT, **content}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise click.ClickException(
            f"{path} exists already: name another file, or remove it if its key is not needed"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def new_key_pair() -> tuple[str, str]:
    """(public, secret) of a new key pair. It is made here: the secret key is never sent."""
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
