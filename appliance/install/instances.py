"""Instances: names, files and ports of the appliances of one host.

Invariants: two instances of a host share no port, directory or socket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from tailrace.core.errors import InvalidSettingError

DEFAULT = "tailrace"
"""Name of the configuration file of the only appliance of most hosts."""
FIRST_PORT, FIRST_CONSOLE_PORT = 7420, 7400
PORT_STEP = 100
"""Ports from one instance to the next; each front takes one."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")


class Instance(NamedTuple):
    """One appliance of a host, as a service."""

    name: str
    configuration: str
    state: str
    text: str
    """Content of its configuration file when it is new."""

    @property
    def service(self) -> str:
        return "tailrace.service" if self.name == DEFAULT else f"tailrace@{self.name}.service"


def check_name(name: str) -> str:
    """The name of an instance.

    Raises: InvalidSettingError.
    """
    if not _NAME.fullmatch(name) or name == DEFAULT:
        raise InvalidSettingError(
            f"--instance is {name!r}; it takes lower-case letters, digits, - and _, begins with a "
            f"letter, has at most 31 characters, and is not {DEFAULT!r}"
        )
    return name


def settings_of_instance(name: str, configurations: Iterable[str]) -> dict[str, object]:
    """Settings that a new instance needs. `configurations` are the texts of the other ones, whose
    ports are not given again.
    """
    taken = {int(port) for text in configurations for port in re.findall(r":(\d{4,5})\b", text)}
    number = 0
    if name != DEFAULT:
        number = 1
        while {FIRST_PORT + PORT_STEP * number, FIRST_CONSOLE_PORT + PORT_STEP * number} & taken:
            number += 1
    directory = DEFAULT if name == DEFAULT else f"{DEFAULT}-{name}"
    return {
        "listen": [
            f"tcp://127.0.0.1:{FIRST_PORT + PORT_STEP * number}",
            f"ipc:///run/{directory}/tailrace.sock",
        ],
        "http.listen": f"127.0.0.1:{FIRST_CONSOLE_PORT + PORT_STEP * number}",
        "data_dirs": [f"/var/lib/{directory}"],
    }


def installed_names(root: str) -> list[str]:
    """Names of the instances that have a configuration under this root directory, the default one
    first.
    """
    directory = os.path.join(root, "etc/tailrace")
    try:
        found = [name.removesuffix(".toml") for name in os.listdir(directory)
                 if name.endswith(".toml")]  # fmt: skip
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda name: (name != DEFAULT, name))
