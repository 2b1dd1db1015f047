"""Every API of the gateway has a rule."""

from __future__ import annotations

from netfront.kafka.apis.table import APIS
from netfront.kafka.rights.table import RULES


def test_every_api_has_a_rule_and_every_rule_an_api() -> None:
    assert set(APIS) == set(RULES), (
        "an API of Kafka needs its rule in netfront/kafka/rights/table.py, and a case in "
        "tests/kafka/users/test_rights.py"
    )
