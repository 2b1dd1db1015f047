"""Token checks: the keys of OAUTHBEARER's tokens, as the settings name them.

Owner: one gateway.

Invariants:
- Keys stay in use until a change brings others that can be used.
- Without OAUTHBEARER among the mechanisms no file is read, and nothing of it is loaded. With it,
  the modules that verify signatures come with the first token, or with another file of keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from shm.rights.bearer_tokens import (
    TokenKeysError,
    TokenRules,
    TokenVerifier,
    file_version,
    token_of,
)

logger = logging.getLogger(__name__)

LIFETIME_MAX_MS = 366 * 86_400_000
_PREFIX = "kafka.sasl.oauthbearer."


class TokenChecks:
    """Checks tokens of clients."""

    def __init__(self, settings: dict[str, Any], wall_us: Callable[[], int]) -> None:
        """Raises TokenKeysError."""
        self._wall_us = wall_us
        self._verifier: TokenVerifier | None = None
        self._made_of: tuple[Any, ...] = ()
        self._use(settings)

    @property
    def can_verify(self) -> bool:
        """True once there are keys."""
        return self._verifier is not None

    def check(self, message: bytes) -> tuple[str, str, int]:
        """The user to act as ("": the token's), the token's user, and for how many milliseconds it
        is accepted. Raises TokenError.
        """
        assert self._verifier is not None
        acts_as, token = token_of(message)
        proven = self._verifier.verify(token)
        lifetime_ms = int(min(proven.ends_s * 1_000 - self._wall_us() / 1_000, LIFETIME_MAX_MS))
        return acts_as, proven.user, max(1, lifetime_ms)

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings, and a file of keys that has been replaced."""
        try:
            if self._use(settings):
                logger.info("kafka_token_keys_reloaded")
        except TokenKeysError as error:
            logger.error("kafka_token_keys_not_reloaded reason=%r", str(error))

    def _use(self, settings: dict[str, Any]) -> bool:
        """Returns True if something has changed. Raises TokenKeysError."""
        if "OAUTHBEARER" not in settings["kafka.sasl.enabled.mechanisms"]:
            return False
        path = settings[f"{_PREFIX}jwks"]
        rules = TokenRules(
            settings[f"{_PREFIX}expected.issuer"],
            tuple(settings[f"{_PREFIX}expected.audience"]),
            settings[f"{_PREFIX}sub.claim.name"],
            settings[f"{_PREFIX}clock.skew.seconds"],
        )
        made_of = (rules, file_version(path))
        if made_of == self._made_of:
            return False
        self._verifier = TokenVerifier(path, rules, loads_late=self._verifier is None)
        self._made_of = made_of
        return True
