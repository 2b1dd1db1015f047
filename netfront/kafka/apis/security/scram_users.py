"""DescribeUserScramCredentials, AlterUserScramCredentials: passwords of users by `kafka-configs`.

The tool sends the salted password; the gateway makes the credential of it, and nothing else of it
goes further. A user that does not exist is made: it may do nothing before a rule allows it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.rights.scram import (
    HASHES,
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    SALT_BYTES_MAX,
    SHA_256,
    SHA_512,
    of_salted_password,
)
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

MECHANISMS = {1: SHA_256, 2: SHA_512}
SIZES = {SHA_256: 32, SHA_512: 64}
User = dict[str, Any]


def describe_credentials(call: Call) -> Steps:
    """List users with their mechanisms; those that are named, or all that have a credential."""
    asked = call.request["users"]
    names = None if asked is None else [user["name"] for user in asked]
    if not names:
        users = yield from _users(call)
        return _described([_credentials(user) for user in users if user["scram"]])
    results = []
    for number, (name, count) in enumerate(Counter(names).items()):
        yield from give_way(call.services, number)
        if count > 1:
            sentence = f"the request names {name} more than once"
            results.append(_failed(name, KafkaError.DUPLICATE_RESOURCE, sentence))
            continue
        user = yield from _user(call, name)
        if user is None or not user["scram"]:
            sentence = f"{name} has no SCRAM credential"
            results.append(_failed(name, KafkaError.RESOURCE_NOT_FOUND, sentence))
        else:
            results.append(_credentials(user))
    return _described(results)


def _described(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {"error_code": KafkaError.NONE, "error_message": None, "results": results}


def _failed(name: str, code: KafkaError, sentence: str) -> dict[str, Any]:
    return {
        "user": name, "error_code": code, "error_message": sentence, "credential_infos": []
    }  # fmt: skip


def _credentials(user: User) -> dict[str, Any]:
    return {
        "user": user["name"], "error_code": KafkaError.NONE, "error_message": None,
        "credential_infos": [
            {"mechanism": number, "iterations": user["scram"][mechanism]}
            for number, mechanism in MECHANISMS.items()
            if mechanism in user["scram"]
        ],
    }  # fmt: skip


def _users(call: Call) -> Steps:
    """All users. Raises RefusedError."""
    found: list[User] = []
    asked: dict[str, Any] = {}
    while True:
        answer = yield call.ask(Api.LIST_USERS, asked)
        if answer.code is not ErrorCode.OK:
            raise RefusedError(_error(answer.code), answer.sentence)
        page = answer.json()
        found += page["users"]
        if page["next"] is None:
            return found
        asked = {"after": page["next"]}


def _user(call: Call, name: str) -> Steps:
    """The user of a name, or None. Raises RefusedError."""
    answer = yield call.ask(Api.LIST_USERS, {"name": name})
    if answer.code is ErrorCode.INVALID_REQUEST:
        return None
    if answer.code is not ErrorCode.OK:
        raise RefusedError(_error(answer.code), answer.sentence)
    (user,) = answer.json()["users"]
    return user


def _error(code: ErrorCode) -> KafkaError:
    if code is ErrorCode.NOT_AUTHORIZED:
        return KafkaError.CLUSTER_AUTHORIZATION_FAILED
    return kafka_error(code)


# ---- alter ---------------------------------------------------------------------------------------


def alter_credentials(call: Call) -> Steps:
    """Set and remove credentials, user by user."""
    changes: dict[str, list[dict[str, Any]]] = {}
    for part in ("deletions", "upsertions"):
        for change in call.request[part]:
            changes.setdefault(change["name"], []).append(change)
    results = []
    for number, (name, some) in enumerate(changes.items()):
        yield from give_way(call.services, number)
        result = {"user": name, "error_code": KafkaError.NONE, "error_message": None}
        results.append(result)
        try:
            yield from _alter(call, name, some)
        except RefusedError as refused:
            result.update(error_code=refused.code, error_message=refused.sentence)
    return {"results": results}


def _alter(call: Call, name: str, changes: list[dict[str, Any]]) -> Steps:
    """Raises RefusedError."""
    mechanisms = [MECHANISMS.get(change["mechanism"]) for change in changes]
    if None in mechanisms:
        raise RefusedError(
            KafkaError.UNSUPPORTED_SASL_MECHANISM, f"there are {' and '.join(HASHES)}"
        )
    if len(set(mechanisms)) < len(mechanisms):
        raise RefusedError(
            KafkaError.DUPLICATE_RESOURCE, f"the request changes a credential of {name} twice"
        )
    asked: dict[str, Any] = {
        "user": name, "action": "set_scram", "credentials": [], "removed_mechanisms": []
    }  # fmt: skip
    for mechanism, change in zip(mechanisms, changes, strict=True):
        assert mechanism is not None
        if "salted_password" in change:
            asked["credentials"].append(_credential(mechanism, change))
        else:
            asked["removed_mechanisms"].append(mechanism)
    if asked["removed_mechanisms"]:
        user = yield from _user(call, name)
        known = {} if user is None else user["scram"]
        if not set(asked["removed_mechanisms"]) <= set(known):
            raise RefusedError(
                KafkaError.RESOURCE_NOT_FOUND, f"{name} has no such credential to remove"
            )
    answer = yield call.ask(Api.ALTER_USERS, asked)
    if answer.code is ErrorCode.INVALID_REQUEST:
        raise RefusedError(KafkaError.UNACCEPTABLE_CREDENTIAL, answer.sentence)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(_error(answer.code), answer.sentence)


def _credential(mechanism: str, change: dict[str, Any]) -> dict[str, Any]:
    """The fields of a credential. Raises RefusedError."""
    salt, salted = bytes(change["salt"]), bytes(change["salted_password"])
    iterations = change["iterations"]
    if (
        not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX
        or not 0 < len(salt) <= SALT_BYTES_MAX
        or len(salted) != SIZES[mechanism]
    ):
        raise RefusedError(
            KafkaError.UNACCEPTABLE_CREDENTIAL,
            f"a credential of {mechanism} has {ITERATIONS_MIN} to {ITERATIONS_MAX} iterations, a "
            f"salt of 1 to {SALT_BYTES_MAX} bytes and a salted password of {SIZES[mechanism]}",
        )
    return of_salted_password(mechanism, salted, salt, iterations).fields()
