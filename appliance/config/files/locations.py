"""Locations of configuration files: the file itself, and the drop-ins beside it.

Drop-ins are `conf.d/*.toml` in the file's directory, in the order of their names. A link to
/dev/null is empty, so that it takes a drop-in of the same name out, as with systemd.
"""

from __future__ import annotations

import os
import re

from appliance.config.files.toml_file import FileProblem

DIRECTORY = "/etc/tailrace"
DEFAULT_PATH = f"{DIRECTORY}/tailrace.toml"
DROP_IN_DIRECTORY = "conf.d"
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def instance_path(name: str) -> str:
    """The file of an instance. Raises FileProblem for a name that could be a path."""
    if not _INSTANCE.fullmatch(name):
        raise FileProblem(
            f"--instance {name[:64]!r}",
            "is no name of an instance: write letters, digits, '-', '_' and '.'",
        )
    return f"{DIRECTORY}/{name}.toml"


def default_path() -> str | None:
    """The file that is read unless another one is given; None if it is missing."""
    return DEFAULT_PATH if os.path.lexists(DEFAULT_PATH) else None


def drop_ins(config_path: str) -> list[str]:
    """Paths of the drop-ins of a file, in their order. Raises FileProblem."""
    directory = os.path.join(os.path.dirname(config_path), DROP_IN_DIRECTORY)
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise FileProblem(directory, "is not a directory; drop-ins are files in it") from None
    except OSError as error:
        raise FileProblem(directory, f"cannot be read: {error.strerror}") from None
    return [
        os.path.join(directory, name)
        for name in names
        if name.endswith(".toml") and not name.startswith(".")
    ]
