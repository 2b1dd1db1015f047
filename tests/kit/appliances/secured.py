"""Appliances with users, and contexts of these users."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson
import zmq

from tailrace import Admin
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded


class Place(NamedTuple):
    """An address as `tests.kit.cli.run` takes it."""

    address: str


def admin_address(appliance: EmbeddedAppliance) -> str:
    """The address of an administrator."""
    return f"context:{appliance.data_dir}/admin.context#{appliance.address}"


def new_keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def server_key(appliance: EmbeddedAppliance) -> str:
    content = orjson.loads(pathlib.Path(appliance.data_dir, "admin.context").read_bytes())
    return str(content["server_keys"][0])


def write_context(path: pathlib.Path, **content: Any) -> str:
    """Write a context. Returns its address."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(orjson.dumps({"format": 1, **content}))
    return f"context:{path}"


class Users:
    """Makes users of an appliance with contexts in a directory."""

    def __init__(self, appliance: EmbeddedAppliance, directory: pathlib.Path) -> None:
        self.appliance = appliance
        self.directory = directory
        self.admin = Admin(admin_address(appliance))

    def context(self, user: str, public: str, secret: str, **changed: Any) -> str:
        content = {
            "user": user, "bootstrap": self.appliance.address,
            "server_keys": [server_key(self.appliance)], "public_key": public,
            "secret_key": secret, **changed,
        }  # fmt: skip
        return write_context(self.directory / f"{user}.context", **content)

    def add(self, user: str, *allowed: str, **fields: Any) -> str:
        """Add a user that is allowed all of this, such as "read topic orders" ("orders." with a
        point at the end is a prefix). Returns the address of its context.
        """
        public, secret = new_keys()
        self.admin.add_user(user, public_key=public, **fields)
        self.allow(f"User:{user}", *allowed)
        return self.context(user, public, secret)

    def allow(self, principal: str, *allowed: str) -> None:
        if allowed:
            self.admin.add_acls([acl(principal, text) for text in allowed])

    def close(self) -> None:
        self.admin.close()


def acl(principal: str, text: str, permission: str = "allow") -> dict[str, str]:
    operation, kind, *name = text.split(" ")
    fields = {
        "principal": principal, "operation": operation, "resource_type": kind,
        "permission": permission,
    }  # fmt: skip
    if name:
        fields["name"] = name[0]
        fields["pattern"] = "prefixed" if name[0].endswith(".") else "literal"
    return fields


@contextmanager
def secured(
    directory: pathlib.Path, listen: str | list[str] = "tcp://127.0.0.1:0", **settings: Any
) -> Iterator[Users]:
    """An appliance with users, and its administrator."""
    appliance = start_embedded(
        listen=listen,
        settings={"security.enabled": "true", **settings},
    )
    try:
        users = Users(appliance, directory)
        try:
            yield users
        finally:
            users.close()
    finally:
        appliance.stop()
