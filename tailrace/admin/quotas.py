"""Administration of quotas: describe and alter. `tailrace.Admin` has these methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.core.errors import InvalidRequestError
from tailrace.core.validation import mapping_of
from tailrace.protocol.frame import Api

T = TypeVar("T")
_EXAMPLE = '{QuotaEntity(user="alice"): {"producer_byte_rate": "10MiB"}}'
_DEFAULT = "*"


class QuotaEntity(NamedTuple):
    """Owner of quotas: a user, a client id, both, or a prefix of topic names. "*" is the default of
    its kind.
    """

    user: str | None = None
    client: str | None = None
    prefix: str | None = None


class QuotaAdmin:
    """The methods of `Admin` for quotas."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    @operation
    def describe_quotas(self) -> Steps[dict[QuotaEntity, dict[str, int]]]:
        """All quotas: QuotaEntity -> {quota: value}."""
        answer = yield from self._call(Api.DESCRIBE_QUOTAS, {})
        return dict(_rule(text) for text in answer["rules"])

    @operation
    def quota_usage(self) -> Steps[list[dict[str, Any]]]:
        """Use of quotas at the front that this client is connected to: dicts with
        `quota`, the entity (`user`, `client` or `prefix`), `used` (of a rate: in all), and `limit`.
        Those of a rate have also `available`, `waiting` (connections and requests), `connections`
        and `throttled_ms`.
        """
        answer = yield from self._call(Api.DESCRIBE_QUOTAS, {})
        return list(answer["usage"])

    @operation
    def alter_quotas(
        self,
        changes: Mapping[QuotaEntity, Mapping[str, int | str | None] | None],
        *,
        validate_only: bool = False,
    ) -> Steps[None]:
        """Change quotas: QuotaEntity -> {quota: value}; None removes a quota, None instead of the
        dict all of the entity's. Others stay. The change is durable, and in force everywhere, when
        the method returns. With `validate_only` it is only checked. Raises InvalidSettingError.
        """
        self._connection.check_usable()
        rows = []
        for entity, values in mapping_of("changes", changes, _EXAMPLE).items():
            if not isinstance(entity, QuotaEntity):
                raise InvalidRequestError(
                    f'{entity!r:.100} has no quotas; write QuotaEntity(user="alice")'
                )
            named = None if values is None else mapping_of(f"quotas of {entity}", values, _EXAMPLE)
            rows.append(
                {
                    **entity._asdict(),
                    "set": {n: v for n, v in (named or {}).items() if v is not None},
                    "unset": None
                    if named is None
                    else [name for name, value in named.items() if value is None],
                }
            )
        if rows:
            request = {"changes": rows, "validate_only": validate_only}
            yield from self._call(Api.ALTER_QUOTAS, request)


def _rule(text: str) -> tuple[QuotaEntity, dict[str, int]]:
    """(Entity, quotas) from the text of a rule."""
    names: dict[str, str] = {}
    values: dict[str, int] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name in QuotaEntity._fields:
            names[name] = value if value == _DEFAULT else unquote(value)
        else:
            values[name] = int(value)
    return QuotaEntity(**names), values
