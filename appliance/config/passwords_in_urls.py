"""Passwords in URLs on command lines: every account of the host sees command lines, and shells keep
them.
"""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"://[^/?#\s:@]*:[^/?#\s]+@")


def has_password(text: str) -> bool:
    """True for a text with a URL that has a password. One with a user name alone has none."""
    return _PASSWORD.search(text) is not None
