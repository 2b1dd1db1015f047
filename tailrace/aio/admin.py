"""`tailrace.Admin` for asyncio. Any number of calls share one connection at a time.

Owner: one event loop's thread.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tailrace.admin.admin import Admin
from tailrace.admin.delays import PendingDelay, delays_request
from tailrace.aio.client import AsyncClient
from tailrace.aio.event_loop import LOOP_RUNTIME, LoopConnection
from tailrace.client.config.kafka_names import RenamedMethods
from tailrace.client.connections.steps import steps_of

T = TypeVar("T")
P = ParamSpec("P")


def _awaited(
    method: Callable[Concatenate[Admin, P], T],
) -> Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]]:
    """Make a method of AsyncAdmin from one of Admin, with the same arguments and errors."""
    steps = steps_of(method)

    @wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(steps(self._admin, *args, **kwargs))

    return call


class PendingDelays:
    """The result of `AsyncAdmin.list_delays`. `async for` reads it page by page, `await` returns a
    list of all.
    """

    def __init__(self, client: AsyncAdmin, request: dict[str, Any]) -> None:
        self._client = client
        self._request = request

    async def __aiter__(self) -> AsyncIterator[PendingDelay]:
        request = dict(self._request)
        while True:
            delays, request["after"] = await self._client._run(
                self._client._admin._delays_page(request)
            )
            for delay in delays:
                yield delay
            if request["after"] is None:
                return

    async def _all(self) -> list[PendingDelay]:
        return [delay async for delay in self]

    def __await__(self) -> Generator[Any, None, list[PendingDelay]]:
        return self._all().__await__()


class AsyncAdmin(AsyncClient, RenamedMethods):
    """`tailrace.Admin` for coroutines: the same arguments, methods and errors. Each method is
    awaited.

    `await asyncio.gather(admin.describe_topics("a"), admin.list_topics())` sends both requests at
    once.
    """

    _renamed = Admin._renamed

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        bootstrap_servers: str | Sequence[str] | None = None,
        request_timeout_ms: int | str | None = None,
        connect_timeout_ms: int | str | None = None,
        client_id: str | None = None,
        context: str | None = None,
    ) -> None:
        """Take the settings of `Admin`. Raises InvalidSettingError."""
        self._admin = Admin(
            bootstrap,
            bootstrap_servers=bootstrap_servers,
            request_timeout_ms=request_timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
            client_id=client_id,
            context=context,
            runtime=LOOP_RUNTIME,
        )
        self._loop_connection = LoopConnection(type(self).__name__, self._admin._connection)

    async def close(self) -> None:
        """Close the client. Calls that wait for a response raise ClientClosedError."""
        self._end(self._admin.close)

    create_topics = _awaited(Admin.create_topics)
    delete_topics = _awaited(Admin.delete_topics)
    derived_topics = _awaited(Admin.derived_topics)
    list_deleted_topics = _awaited(Admin.list_deleted_topics)
    undelete_topic = _awaited(Admin.undelete_topic)
    purge_topic = _awaited(Admin.purge_topic)
    compact_topic = _awaited(Admin.compact_topic)
    list_users = _awaited(Admin.list_users)
    add_user = _awaited(Admin.add_user)
    alter_user = _awaited(Admin.alter_user)
    delete_user = _awaited(Admin.delete_user)
    disable_user = _awaited(Admin.disable_user)
    enable_user = _awaited(Admin.enable_user)
    add_user_key = _awaited(Admin.add_user_key)
    remove_user_key = _awaited(Admin.remove_user_key)
    list_acls = _awaited(Admin.list_acls)
    add_acls = _awaited(Admin.add_acls)
    remove_acls = _awaited(Admin.remove_acls)
    test_acl = _awaited(Admin.test_acl)
    alter_topics = _awaited(Admin.alter_topics)
    describe_schemas = _awaited(Admin.describe_schemas)
    create_partitions = _awaited(Admin.create_partitions)
    move_partition = _awaited(Admin.move_partition)
    list_topics = _awaited(Admin.list_topics)
    partition_counts = _awaited(Admin.partition_counts)
    topic_info = _awaited(Admin.topic_info)
    describe_topics = _awaited(Admin.describe_topics)
    describe_configs = _awaited(Admin.describe_configs)
    alter_configs = _awaited(Admin.alter_configs)
    config_state = _awaited(Admin.config_state)
    reload_config = _awaited(Admin.reload_config)
    describe_quotas = _awaited(Admin.describe_quotas)
    quota_usage = _awaited(Admin.quota_usage)
    alter_quotas = _awaited(Admin.alter_quotas)
    offsets = _awaited(Admin.offsets)
    delete_records = _awaited(Admin.delete_records)
    lease_offsets = _awaited(Admin.lease_offsets)
    list_groups = _awaited(Admin.list_groups)
    describe_groups = _awaited(Admin.describe_groups)
    list_group_offsets = _awaited(Admin.list_group_offsets)
    alter_group_offsets = _awaited(Admin.alter_group_offsets)
    delete_groups = _awaited(Admin.delete_groups)
    list_transactions = _awaited(Admin.list_transactions)
    describe_transactions = _awaited(Admin.describe_transactions)
    abort_transaction = _awaited(Admin.abort_transaction)
    commit_transaction = _awaited(Admin.commit_transaction)
    find_hanging_transactions = _awaited(Admin.find_hanging_transactions)
    transaction_totals = _awaited(Admin.transaction_totals)
    cancel_delays = _awaited(Admin.cancel_delays)
    reschedule_delays = _awaited(Admin.reschedule_delays)
    describe_delays = _awaited(Admin.describe_delays)
    describe_cluster = _awaited(Admin.describe_cluster)
    bring_online = _awaited(Admin.bring_online)

    def list_delays(
        self,
        topic: str,
        *,
        partition: int | None = None,
        key: bytes | str | None = None,
        due_from: dt.datetime | None = None,
        due_to: dt.datetime | None = None,
    ) -> PendingDelays:
        """The delayed records of a topic, by partition and due time. Use `async for`, or await it
        for a list. Raises UnknownTopicError, InvalidRequestError.
        """
        return PendingDelays(self, delays_request(topic, partition, key, due_from, due_to))
