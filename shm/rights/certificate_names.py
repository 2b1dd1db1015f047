"""Names of users in certificates: a subject, and the rules that turn it into a user's name.

Owner: pure. The supervisor checks rules, the Kafka gateway uses them.

Source: Kafka's ssl.principal.mapping.rules (KIP-371).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_SHORT = {
    "commonName": "CN", "countryName": "C", "stateOrProvinceName": "ST", "localityName": "L",
    "organizationName": "O", "organizationalUnitName": "OU", "streetAddress": "STREET",
    "domainComponent": "DC", "userId": "UID", "emailAddress": "EMAILADDRESS",
}  # fmt: skip
_RULE = re.compile(r"RULE:((?:\\/|[^/])*)/((?:\\/|[^/])*)/([LU]?)")


def distinguished_name(certificate: dict[str, Any]) -> str:
    """The subject of a certificate as Kafka writes it: the last part first."""
    parts = [
        f"{_SHORT.get(name, name)}={_escaped(value)}"
        for part in reversed(certificate.get("subject", ()))
        for name, value in part
    ]
    return ",".join(parts)


def _escaped(value: str) -> str:
    return re.sub(r'([,+"\\<>;=])', r"\\\1", value)


class PrincipalRules:
    """Rules that turn a certificate's subject into the name of a user, as Kafka's
    ssl.principal.mapping.rules: `RULE:PATTERN/REPLACEMENT/[L|U]`, and DEFAULT for the subject.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        """Raises ValueError."""
        self._rules = [(None, "", "") if rule == "DEFAULT" else _rule(rule) for rule in rules]

    def user(self, subject: str) -> str | None:
        """The name for a subject; None: no rule matches."""
        for pattern, replacement, case in self._rules:
            if pattern is None:
                return subject
            found = pattern.fullmatch(subject)
            if found is not None:
                name = found.expand(replacement)
                return {"L": name.lower(), "U": name.upper()}.get(case, name)
        return None


def _rule(text: str) -> tuple[re.Pattern[str], str, str]:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(
            f"kafka.tls.principal.mapping.rules has {text!r:.200}; write "
            "RULE:PATTERN/REPLACEMENT/, with L or U behind it for lower or upper case, or DEFAULT"
        )
    try:
        pattern = re.compile(found[1].replace("\\/", "/"))
        replacement = re.sub(r"\$(\d)", r"\\g<\1>", found[2].replace("\\/", "/"))
        re.sub(pattern, replacement, "")
        if (
            len(re.findall(r"\\g<(\d)>", replacement))
            and max(map(int, re.findall(r"\\g<(\d)>", replacement))) > pattern.groups
        ):
            raise ValueError("it names a group that the pattern does not have")
    except (re.error, ValueError, IndexError) as error:
        raise ValueError(
            f"kafka.tls.principal.mapping.rules has {text!r:.200}, which is not valid: {error}"
        ) from None
    return pattern, replacement, found[3]
