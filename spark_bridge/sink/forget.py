"""Deletes what the appliance keeps of a sink: the mark of its last batch, and the topics of the
former sink.

Owner: the caller; no query of this sink runs.
"""

from __future__ import annotations

import uuid

from spark_bridge.sink.former_log import topics_of
from spark_bridge.sink.options import PUBLISH_TIMEOUT_MS
from spark_bridge.sink.transaction import TransactionClient
from tailrace.admin.admin import Admin

TRANSACTION_TIMEOUT_MS = 1_000


def forget(identity: str, bootstrap: str | None) -> None:
    """Delete the mark and the topics of a sink. Raises TailraceError."""
    with Admin(bootstrap) as admin:
        client = TransactionClient(admin._connection, identity, PUBLISH_TIMEOUT_MS)
        if client.mark() is not None:
            joined = client.join(uuid.uuid4().hex, TRANSACTION_TIMEOUT_MS)
            client.commit(joined.transaction, (), "")
        if names := topics_of(identity, list(admin.partition_counts(internal=True))):
            admin.delete_topics(names)
