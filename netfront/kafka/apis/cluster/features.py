"""Features of Kafka at the level that the APIs have. UpdateFeatures changes none."""

from __future__ import annotations

from netfront.kafka.apis.call import Call
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError

FEATURES = {"group.version": 1, "share.version": 1, "transaction.version": 2}


def update_features(call: Call) -> Steps:
    """Accept the levels that there are, refuse others."""
    yield from ()
    results = []
    for update in call.request["feature_updates"]:
        name, level = update["feature"], update["max_version_level"]
        code, sentence = KafkaError.NONE, None
        if FEATURES.get(name) != level:
            code = KafkaError.INVALID_UPDATE_VERSION
            sentence = (
                f"{name} is {FEATURES[name]} here, and follows the version of the appliance: "
                "upgrade that"
                if name in FEATURES
                else f"there is no feature {name}; there are {', '.join(FEATURES)}"
            )
        results.append({"feature": name, "error_code": code, "error_message": sentence})
    failed = [result for result in results if result["error_code"] is not KafkaError.NONE]
    if failed:
        return {
            "error_code": failed[0]["error_code"], "error_message": failed[0]["error_message"],
            "results": results,
        }  # fmt: skip
    return {"error_code": KafkaError.NONE, "error_message": None, "results": results}
