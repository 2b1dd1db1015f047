"""Tokens of scrapers: each lets its holder read `/metrics`, and nothing else.

They are in a file of the data directory, as hashes. `tailrace token` on the host of the appliance
changes it; the console looks at it with each request that carries a token.

Owner: the commands of the account that owns the directory. The console only reads.

Invariants:
- Nothing of a token but its SHA-256 is kept. It is 32 random bytes, so that needs no salt.
- A token that was removed or has expired is refused from the next request on.
- A damaged file, or one that others may write, lets nobody in.

Crash: the old or the new file is there, whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tailrace.format.directory import checked_json

FILE_NAME = "http_tokens.json"
LOCK_NAME = "http_tokens.lock"
METRICS = "metrics"
SCOPES = (METRICS,)
TOKENS_MAX = 1_000
PREFIX = "trt_"
"""Begin of each token, by which scanners for secrets find one that was published."""
_TOKEN = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ScraperToken(NamedTuple):
    """A token as the file has it."""

    name: str
    scope: str
    sha256: str
    created_us: int
    expires_us: int
    """0: never."""

    def has_expired(self, now_us: int) -> bool:
        return 0 < self.expires_us <= now_us


class TokensDamagedError(ValueError):
    """The file cannot be used."""


def read_tokens(data_dir: str) -> list[ScraperToken]:
    """All tokens. Raises OSError, TokensDamagedError."""
    path = os.path.join(data_dir, FILE_NAME)
    try:
        content: Any = checked_json.decode(checked_json.read(path))
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return []
    if mode & 0o022:
        raise TokensDamagedError(f"others may write {path} (mode {mode:04o}): run chmod 600 {path}")
    try:
        assert content["format"] == 1
        return [ScraperToken(**row) for row in content["tokens"]]
    except (AssertionError, KeyError, TypeError):
        raise TokensDamagedError(
            f"{path} is damaged: move it away, and make new tokens with `tailrace token add`"
        ) from None


def add_token(data_dir: str, name: str, scope: str, expires_us: int, now_us: int) -> str:
    """Make a token. Returns its text, which is not kept. Raises OSError, ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the name of the token is {name!r:.100}; write 1 to 64 of the characters a-z, A-Z, "
            "0-9, '.', '_' and '-'"
        )
    text = PREFIX + secrets.token_urlsafe(32)
    with _changing(data_dir) as tokens:
        if any(token.name == name for token in tokens):
            raise ValueError(f"there is a token {name!r}: remove it first, or choose another name")
        if len(tokens) >= TOKENS_MAX:
            raise ValueError(f"there are {TOKENS_MAX} tokens, the limit: remove some")
        tokens.append(ScraperToken(name, scope, _hash(text), now_us, expires_us))
    return text


def remove_token(data_dir: str, name: str) -> bool:
    """Remove a token. Returns False if there is none of this name. Raises OSError, ValueError."""
    with _changing(data_dir) as tokens:
        kept = [token for token in tokens if token.name != name]
        was_there = len(kept) < len(tokens)
        tokens[:] = kept
    return was_there


@contextmanager
def _changing(data_dir: str) -> Iterator[list[ScraperToken]]:
    """The tokens, which are stored at the end. Commands that run at once wait for each other."""
    lock = os.open(
        os.path.join(data_dir, LOCK_NAME),
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
    )  # fmt: skip
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tokens = read_tokens(data_dir)
        before = list(tokens)
        yield tokens
        if tokens != before:
            content = {"format": 1, "tokens": [token._asdict() for token in tokens]}
            checked_json.replace(os.path.join(data_dir, FILE_NAME), checked_json.encode(content))
    finally:
        os.close(lock)


def is_allowed(data_dir: str, text: str, scope: str, now_us: int) -> bool:
    """True if the text is a token of this scope."""
    if not _TOKEN.fullmatch(text):
        return False
    try:
        tokens = read_tokens(data_dir)
    except (OSError, TokensDamagedError):
        return False
    given = _hash(text)
    found = [token for token in tokens if secrets.compare_digest(token.sha256, given)]
    return any(token.scope == scope and not token.has_expired(now_us) for token in found)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
