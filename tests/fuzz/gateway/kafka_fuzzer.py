"""Bent requests of every Kafka API against a running gateway.

Each request is one of the message definitions with values that fit the appliance (its topic, its
groups). Then it is damaged: lengths, counts, varints and single bytes get other values, the end is
cut off, or the frame's size lies. A finding is a gateway that ended, that counted an internal
error, or that does not answer a good request on another connection.

`make fuzz FUZZ=kafka SECONDS=600 SEED=1`; a line names the seed of a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from netfront.kafka.apis.table import APIS
from netfront.kafka.wire.definitions import definitions, is_flexible
from netfront.kafka.wire.encoding import request_writer
from shm.rights.passwords import fields_of
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.secured import secured
from tests.kit.peers.bearer_tokens import Provider, first_message, token_settings, write_keys
from tests.kit.peers.kafka_batches import kafka_batch
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import children

TOPIC = "fuzzed"
NAMES = (TOPIC, "absent", "", "x" * 300, "bad/name", "\0")
NUMBERS = (0, 1, -1, -2, 7, 100, 0x7FFF, -0x8000)
SETTINGS = (
    "retention.ms", "share.auto.offset.reset", "consumer.session.timeout.ms", "earliest", "7000"
)  # fmt: skip
RESOURCES = (2, 4, 32, 32, 0, -1, 16)
BATCHES = [
    kafka_batch(*[value] * 3, codec=codec) for codec in range(5) for value in (b"v", bytes(600_000))
]
"""Good batches: small ones, and some whose records are split."""
BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x3D)
ANSWER_S = 0.2
"""Time that an answer to a bent request is waited for: there need not be one."""


def value(field: dict[str, Any], version: int, rng: random.Random) -> Any:
    """A value of a field, mostly one that makes sense."""
    kind: str = field["type"]
    if version >= field.get("null", version + 1) and rng.random() < 0.3:
        return None
    if kind.startswith("[]"):
        element = {**field, "type": kind[2:], "null": version + 1}
        made = [value(element, version, rng) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
        return made * rng.choice((2, 300)) if rng.random() < 0.05 else made
    if kind == "struct":
        return {
            inner["name"]: value(inner, version, rng)
            for inner in field["fields"]
            if inner["low"] <= version <= inner["high"]
        }
    if kind == "string":
        if field["name"] in ("name", "value") and rng.random() < 0.3:
            return rng.choice(SETTINGS)
        return rng.choice((TOPIC, TOPIC, *NAMES))
    if kind == "records" and rng.random() < 0.5:
        return rng.choice(BATCHES)
    if kind in ("bytes", "records"):
        return rng.randbytes(rng.choice((0, 1, 12, 61, 80, 300)))
    if kind == "uuid":
        return rng.randbytes(16)
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "float64":
        return rng.random()
    if field["name"].endswith("wait_ms"):
        return rng.choice((0, 1, -1))
    if field["name"] == "resource_type":
        return rng.choice(RESOURCES)
    bits = int(kind.strip("uint"))
    if kind.startswith("uint"):
        return rng.randrange(1 << bits)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    chosen = rng.choice((*NUMBERS, low, high, rng.randrange(low, high)))
    return max(low, min(high, chosen))


def request(rng: random.Random) -> tuple[int, int, bytes]:
    """(API, version, body) of a request that is well formed."""
    api = rng.choice(sorted(APIS))
    row = APIS[api]
    version = rng.randint(row.low, row.high)
    fields = definitions()[str(api)]["request"]
    message = value({"type": "struct", "fields": fields, "name": ""}, version, rng)
    body = bytearray()
    request_writer(api, version)(body, message)
    return api, version, bytes(body)


def bend(body: bytes, rng: random.Random) -> bytes:
    """Damage a body."""
    bent = bytearray(body)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        if not bent:
            break
        at = rng.randrange(len(bent))
        way = rng.randrange(4)
        if way == 0:
            bent[at] = rng.choice(BYTES)
        elif way == 1:
            bent[at : at + 4] = struct.pack(">i", rng.choice((-1, -2, 0x7FFFFFFF, 0x00FFFFFF)))
        elif way == 2:
            bent[at:at] = b"\xff" * rng.choice((1, 5, 11))
        else:
            del bent[at : at + rng.choice((1, 2, 100))]
    return bytes(bent)


def frame(api: int, version: int, body: bytes, rng: random.Random) -> bytes:
    """A whole request, sometimes with a size, an API or a client id that lies."""
    head = struct.pack(">hhih", api, version, rng.randrange(1 << 31), 4) + b"fuzz"
    if is_flexible(api, version):
        head += b"\0"
    size = len(head) + len(body)
    chance = rng.random()
    if chance < 0.03:
        size = rng.choice((0, 3, -1, 0x7FFFFFFF, size + 1, size - 1))
    elif chance < 0.06:
        head = struct.pack(">hhih", rng.randrange(-5, 120), rng.randrange(-1, 99), 1, -1)
        size = len(head) + len(body)
    elif chance < 0.08:
        head = struct.pack(">hhih", api, version, 1, rng.choice((-2, 0x7FFF, 200))) + b"fuzz"
    return struct.pack(">i", size) + head + body


HANDSHAKE, AUTHENTICATE, METADATA = 17, 36, 3
PASSWORD = "correct horse"
ADMINISTRATOR, READER = "administrator", "reader"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")


class Logins:
    """Logs connections in, well or badly."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def log_in(self, client: RawKafka, rng: random.Random) -> None:
        """Raises OSError or AssertionError: the connection was closed."""
        user = rng.choice((ADMINISTRATOR, ADMINISTRATOR, READER, "nobody"))
        chance = rng.random()
        if chance < 0.1:
            return
        if chance < 0.7:
            self.as_user(client, user, by_token=rng.random() < 0.3)
            return
        for _ in range(rng.choice((1, 2))):
            version = rng.choice((0, 1))
            client.send(HANDSHAKE, version, {"mechanism": rng.choice(MECHANISMS)})
            client.receive_bytes()  # or a late response to the login before
            tokens = (
                plain_token(user), first_message(self._provider.token(user)),
                b"n,,n=" + user.encode() + b",r=" + b"x" * 24, b"c=biws,r=x,p=eA==", b"",
            )  # fmt: skip
            for _ in range(rng.choice((1, 2))):
                token = bend(rng.choice(tokens), rng)
                if version == 0:
                    client.send_bytes(struct.pack(">i", len(token)) + token)
                else:
                    client.send(AUTHENTICATE, 1, {"auth_bytes": token})
                with contextlib.suppress(TimeoutError):
                    client.receive_bytes()

    def as_user(self, client: RawKafka, user: str, *, by_token: bool = False) -> None:
        """Log in as it should be."""
        mechanism = "OAUTHBEARER" if by_token else "PLAIN"
        assert client.ask(HANDSHAKE, 1, {"mechanism": mechanism})["error_code"] == 0
        token = first_message(self._provider.token(user)) if by_token else plain_token(user)
        client.ask(AUTHENTICATE, 2, {"auth_bytes": token})


def plain_token(user: str) -> bytes:
    return f"\0{user}\0{PASSWORD}".encode()


def connected(address: str, rng: random.Random, logins: Logins | None) -> RawKafka | None:
    """A connection for bent requests; None: its login has ended it."""
    client = RawKafka(address)
    client.set_timeout(ANSWER_S)
    if logins is not None:
        try:
            logins.log_in(client, rng)
        except (OSError, AssertionError):
            client.close()
            return None
    return client


def script(address: str, seed: int, requests: int = 40, logins: Logins | None = None) -> None:
    """Send one seed's requests. Raises AssertionError: the gateway does not answer others."""
    rng = random.Random(seed)
    client: RawKafka | None = None
    for _ in range(requests):
        client = client or connected(address, rng, logins)
        if client is None:
            continue
        api, version, body = request(rng)
        if rng.random() < 0.7:
            body = bend(body, rng)
        try:
            client.send_bytes(frame(api, version, body, rng))
            if rng.random() < 0.7 and client.receive_bytes() is None:
                raise ConnectionError
        except TimeoutError:
            pass
        except OSError:
            client.close()
            client = None
    if client is not None:
        client.close()
    with RawKafka(address) as good:
        if logins is not None:
            logins.as_user(good, ADMINISTRATOR)
        assert good.ask(METADATA, 9, {"topics": [{"name": TOPIC}]})["brokers"], "no answer"


@contextlib.contextmanager
def plain_gateway() -> Iterator[tuple[EmbeddedAppliance, None]]:
    """An appliance without users."""
    appliance = start_embedded(settings={"kafka.listen": "127.0.0.1:0"})
    try:
        yield appliance, None
    finally:
        with contextlib.suppress(Exception):
            appliance.stop()


@contextlib.contextmanager
def secured_gateway() -> Iterator[tuple[EmbeddedAppliance, Logins]]:
    """An appliance with users."""
    with tempfile.TemporaryDirectory() as directory:
        place, provider = pathlib.Path(directory), Provider()
        path = write_keys(place / "keys.json", provider.public())
        with secured(place, **token_settings(path)) as users:
            users.add(ADMINISTRATOR, **fields_of(PASSWORD), admin=True)
            rights = (f"read topic {TOPIC}", "describe cluster", f"read group {TOPIC}")
            users.add(READER, *rights, **fields_of(PASSWORD))
            yield users.appliance, Logins(provider)


def internal_errors(appliance: EmbeddedAppliance) -> list[str]:
    """Log lines of requests that failed with an unexpected error."""
    with open(appliance.log_path, encoding="utf-8", errors="replace") as log:
        return [line for line in log if "internal_error" in line or "Traceback" in line]


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for the given time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("--users", action="store_true")
    given = parser.parse_args(arguments)
    seed, until = given.seed * 1_000_000, time.monotonic() + given.seconds
    with secured_gateway() if given.users else plain_gateway() as (appliance, logins):
        pid = children(appliance)["tr-kafka-0"]
        while time.monotonic() < until:
            script(appliance.kafka_addresses[0], seed, logins=logins)
            found = internal_errors(appliance)
            if found or children(appliance).get("tr-kafka-0") != pid:
                print(f"seed {seed}:", *found or ["the gateway ended"], sep="\n")
                return 1
            seed += 1
    print(f"{seed - given.seed * 1_000_000} scripts, no finding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
