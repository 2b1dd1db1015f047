"""The token that allows changes through the console: a credential of the service, or one line in a
file of the data directory.

Owner: the console process makes the file when it is missing or damaged. `tailrace console` reads
it: an account that may read the data directory may use it. With a credential there is no file.
Invariants:
- Only the owner can read the file.
- A link in its place is never followed.
- A credential that cannot be read, or is no token, allows no changes. The file does not replace it.
Crash: the file is there whole, or is made again with another token.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from contextlib import suppress

from appliance.data.credentials import credential
from tailrace.format.directory import checked_json

logger = logging.getLogger("appliance.observe.http_server")

FILE_NAME = "console.token"
_TOKEN_BYTES = 32
_TOKEN = re.compile(rb"[A-Za-z0-9_-]{43}\n?")
_GIVEN = re.compile(rb"[A-Za-z0-9_-]{16,256}\n?")


def read_token(data_dir: str) -> str | None:
    """The token; None if there is none, or the file is damaged. Raises OSError."""
    try:
        content = checked_json.read(os.path.join(data_dir, FILE_NAME))
    except FileNotFoundError:
        return None
    return content.decode().strip() if _TOKEN.fullmatch(content) else None


def ensure_token(data_dir: str) -> str:
    """The token; a new one if there is none. Raises OSError."""
    token = read_token(data_dir)
    if token is None:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        checked_json.replace(os.path.join(data_dir, FILE_NAME), token.encode() + b"\n")
    return token


def given_token() -> str | None:
    """The token that the service manager gives; None: it gives none. Raises OSError."""
    content = credential(FILE_NAME)
    if content is None:
        return None
    if not _GIVEN.fullmatch(content):
        raise OSError(
            f"the credential {FILE_NAME} is no token; give 16 to 256 letters, digits, - and _"
        )
    return content.decode().strip()


class Token:
    """The token that allows changes, made when the page is loaded."""

    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir
        try:
            self.read()
            if given_token() is not None:
                with suppress(FileNotFoundError):  # nobody is to be given the old one
                    os.unlink(os.path.join(data_dir, FILE_NAME))
        except OSError as error:
            logger.warning("no_console_token reason=%r changes=refused", str(error))

    def read(self) -> str:
        """The token. Raises OSError."""
        return given_token() or ensure_token(self._data_dir)
