"""Rules of the administration of users, rights and quotas: all of a request, or nothing."""

from __future__ import annotations

from netfront.kafka.apis.call import Call
from netfront.kafka.rights.checks import ON_CLUSTER, AnsweredError, Entry, is_allowed, sentence
from netfront.kafka.wire.errors import KafkaError
from shm.rights.acl import ALTER, ALTER_CONFIGS, CLUSTER


def _denied(call: Call, operation: str) -> Entry | None:
    """The error that each entry of the response has; None: the user may do it."""
    if is_allowed(call, operation, *ON_CLUSTER):
        return None
    return {
        "error_code": KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        "error_message": sentence(call, operation, CLUSTER, ""),
    }


def create_acls(call: Call) -> None:
    """Alter of the cluster."""
    if denied := _denied(call, ALTER):
        raise AnsweredError({"results": [denied for _ in call.request["creations"]]})


def delete_acls(call: Call) -> None:
    """Alter of the cluster."""
    if denied := _denied(call, ALTER):
        results = [{**denied, "matching_acls": []} for _ in call.request["filters"]]
        raise AnsweredError({"filter_results": results})


def alter_quotas(call: Call) -> None:
    """Alter-configs of the cluster."""
    if denied := _denied(call, ALTER_CONFIGS):
        entries = [{**denied, "entity": each["entity"]} for each in call.request["entries"]]
        raise AnsweredError({"entries": entries})


def alter_credentials(call: Call) -> None:
    """Alter of the cluster."""
    if denied := _denied(call, ALTER):
        changes = [*call.request["deletions"], *call.request["upsertions"]]
        names = dict.fromkeys(change["name"] for change in changes)
        raise AnsweredError({"results": [{**denied, "user": name} for name in names]})
