"""Requests of clients to the controller: each goes to the part that serves its API.

Owner: the controller.
Invariants: any content of a request is answered with a code and a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from appliance.catalog.catalog import Catalog
from appliance.control.describe_cluster import ClusterDescription
from appliance.control.offset_leases import OffsetLeases
from appliance.control.producer_ids import ProducerIds
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.request_fields import Requester
from appliance.control.settings.config_commands import CONFIG_APIS, ConfigCommands
from appliance.control.topics.bin import BIN_APIS, TopicBin
from appliance.control.topics.change_queue import CHANGES, TopicChangeQueue
from appliance.control.topics.compaction_requests import CompactionRequests
from appliance.control.topics.topic_commands import TopicCommands
from appliance.control.users.rights import Rights
from shm.messages.lane_messages import AUDIT_REQUEST
from shm.runtime.error_handler import CountedErrorHandler
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_error, encode_reply

if TYPE_CHECKING:
    from appliance.control.audit_writer import AuditWriter

USER_APIS = (Api.LIST_USERS, Api.ALTER_USERS, Api.LIST_ACLS, Api.ALTER_ACLS, Api.TEST_ACL)


class RequestHandler:
    """Finds the part of the controller that serves a request, and sends its answer."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        changes: TopicChangeQueue,
        commands: TopicCommands,
        topic_bin: TopicBin,
        compaction: CompactionRequests,
        leases: OffsetLeases[LaneSender],
        producer_ids: ProducerIds,
        configs: ConfigCommands,
        rights: Rights,
        description: ClusterDescription,
        audit: AuditWriter | None,
        send: Callable[[Requester, ErrorCode, bytes], None],
        error_handler: CountedErrorHandler,
        answer_max: int,
    ) -> None:
        """`send`: answers a client. `answer_max`: limit of an answer's body, bytes."""
        self._catalog = catalog
        self._changes = changes
        self._commands = commands
        self._bin = topic_bin
        self._compaction = compaction
        self._leases = leases
        self._producer_ids = producer_ids
        self._configs = configs
        self._rights = rights
        self._description = description
        self._audit = audit
        self._send = send
        self._error_handler = error_handler
        self._answer_max = answer_max

    def handle(self, requester: Requester, api: int, payload: bytes, now_ns: int) -> None:
        """Handle one request."""
        try:
            if api in CHANGES:
                self._changes.take(requester, Api(api), payload, now_ns)
                return
            if api == Api.LEASE_OFFSETS:
                failed = self._leases.take(requester, decode_json(payload), now_ns)
                self._catalog.afterwards(lambda: None, failed)
                return
            if api == Api.INIT_PRODUCER_ID:
                self._producer_ids.take(requester, decode_json(payload))
                return
            answer = self._answer(requester, api, decode_json(payload), now_ns)
            if answer is None:
                return
            code, body = encode_reply(ErrorCode.OK, answer, self._answer_max)
        except TailraceError as error:
            code, body = error.code, encode_error(error.detail)
        except Exception as error:  # the boundary of one request
            code, body = (
                ErrorCode.INTERNAL_ERROR,
                encode_error(
                    self._error_handler.on_error(f"api={api} session={requester.session}", error)
                ),
            )
        self._send(requester, code, body)

    def _answer(
        self, requester: Requester, api: int, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any] | None:
        """The response; None if it follows later. Raises TailraceError."""
        if api in BIN_APIS:
            return self._bin.take(requester, api, request, now_ns, self._answer_max)
        if api in CONFIG_APIS:
            return self._configs.take(requester, api, request, now_ns)
        if api == Api.DESCRIBE_SCHEMAS:
            return self._commands.describe_schemas(request)
        if api == Api.COMPACT_TOPIC:
            return self._compaction.take(request)
        if api == AUDIT_REQUEST and self._audit is not None:
            return self._audit.write(request)
        if api == Api.DESCRIBE_CLUSTER:
            return self._description.describe(request)
        if api in USER_APIS:
            return self._rights.commands().take(
                api, request,
                lambda answer: self._send(
                    requester, *encode_reply(ErrorCode.OK, answer, self._answer_max)
                ),
                lambda error: self._send(requester, error.code, encode_error(error.detail)),
            )  # fmt: skip
        raise TailraceError(f"API {api} is not served by the controller", ErrorCode.UNKNOWN_API)
