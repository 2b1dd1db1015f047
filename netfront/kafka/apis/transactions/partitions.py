"""AddPartitionsToTxn, AddOffsetsToTxn: checks alone, because batches open their transaction."""

from __future__ import annotations

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.transactions.owner import producer_or_error
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError


def add_partitions(call: Call) -> Steps:
    """Accept partitions: their batches open the transaction there."""
    request, routes = call.request, call.services.routes
    error, found = yield from producer_or_error(call, 2)
    if found is not None and found.was_aborted:
        error = KafkaError.INVALID_TXN_STATE
    results = []
    for topic in request["v3_and_below_topics"]:
        entries = []
        for partition in topic["partitions"]:
            known = routes.find_by_name(topic["name"], partition) is not None
            code = error
            if code is KafkaError.NONE and not known:
                code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            entries.append({"partition_index": partition, "partition_error_code": code})
        results.append({"name": topic["name"], "results_by_partition": entries})
    return {"results_by_topic_v3_and_below": results}


def add_offsets(call: Call) -> Steps:
    """Accept a group: its offsets travel with the commit."""
    error, _ = yield from producer_or_error(call, 2)
    return {"error_code": error}
