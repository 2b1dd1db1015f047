"""Owners that are named: any process of the name is the owner, as the tasks of one Spark run are.

`attempt` is the name. An init with the name of the present owner takes nothing over. The names of
owners that were replaced are kept with the id, and refused.

Owner: none; pure functions.
Invariants: a name that another init has replaced never becomes the owner again, as long as it is
    among the last REPLACED_MAX.
"""

from __future__ import annotations

import orjson

from appliance.groups.base.request_validation import shown
from appliance.groups.store.schema import TransactionalIdRow
from tailrace.core.errors import ProducerFencedError

REPLACED_MAX = 32


def check_not_replaced(row: TransactionalIdRow, attempt: str) -> None:
    """Refuse the name of an owner that was replaced. Raises ProducerFencedError."""
    if attempt and attempt in _replaced(row):
        raise ProducerFencedError(
            f"the owner {shown(attempt)} of the transactional id {shown(row.transactional_id)} was "
            "replaced by another one"
        )


def replaced_after(row: TransactionalIdRow, *, is_shared: bool) -> str:
    """The names that are refused once another owner has replaced the one of this row."""
    if not row.replaced and not is_shared:
        return ""
    names = [*_replaced(row), *([row.attempt] if row.attempt else [])]
    return orjson.dumps(names[-REPLACED_MAX:]).decode()


def _replaced(row: TransactionalIdRow) -> list[str]:
    return orjson.loads(row.replaced) if row.replaced else []
