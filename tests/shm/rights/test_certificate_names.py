"""Subjects of certificates become names of users by Kafka's rules."""

from __future__ import annotations

import pytest

from shm.rights.certificate_names import PrincipalRules, distinguished_name

BY_COMMON_NAME = "RULE:^(?:.*[^\\\\],)?CN=([A-Za-z0-9._@-]+)(?:,.*)?$/$1/"


def subject(*parts: tuple[str, str]) -> dict[str, object]:
    return {"subject": tuple((part,) for part in parts)}


def test_a_subject_is_written_as_kafka_does() -> None:
    found = subject(
        ("countryName", "DE"), ("organizationName", "A, B"), ("commonName", "shop"), ("serial", "1")
    )
    assert distinguished_name(found) == "serial=1,CN=shop,O=A\\, B,C=DE"
    assert distinguished_name({}) == ""


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        ([BY_COMMON_NAME], "CN=shop,O=A", "shop"),
        ([BY_COMMON_NAME], "O=A,CN=Shop", "Shop"),
        ([BY_COMMON_NAME], "O=A\\,CN=admin,C=DE", None),
        ([BY_COMMON_NAME], "CN=shop\\,x,O=A", None),
        ([BY_COMMON_NAME], "", None),
        (["RULE:^CN=(.*?),OU=(.*?)$/$1.$2/L"], "CN=Shop,OU=North", "shop.north"),
        (["RULE:^CN=x$/y/", "RULE:^CN=(.*)$/$1/U"], "CN=shop", "SHOP"),
        (["RULE:^UID=(a\\/b)$/$1/"], "UID=a/b", "a/b"),
        (["DEFAULT"], "CN=shop", "CN=shop"),
        ([], "CN=shop", None),
    ],
)
def test_the_first_rule_that_matches_decides(
    rules: list[str], name: str, expected: str | None
) -> None:
    assert PrincipalRules(rules).user(name) == expected


@pytest.mark.parametrize(
    "bad", ["", "CN", "RULE:(/$1/", "RULE:^a$/$1/", "RULE:^a$/b", "RULE:a/b/X"]
)
def test_a_rule_that_means_nothing_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"kafka\.tls\.principal\.mapping\.rules"):
        PrincipalRules([bad])
