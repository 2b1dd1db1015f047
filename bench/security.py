"""Users, rules and encryption: `make bench-security`. A table and a results file.

Two appliances run beside each other, and take turns piece by piece. So what else the host does
meanwhile reaches both. Each row has the ratios or differences of ROUNDS (5) pairs, by the clock and
by the processor time of fronts and client. The latter is what others' load changes least.

- `curve`: an encrypted connection against a plain one: batches of 64 KiB and of 1 MiB, and the
  round trip of one small record.
- `rules`: a user with 10,000 ACLs against an appliance without users, both over a Unix socket,
  without encryption.
- `login`: from a new client to its first acknowledgement, encrypted against plain.
- `catalog`: 100,000 users and 100,000 ACLs: the start, and a change until it is in force.
- `tenants`: acknowledgements of a quiet user alone, and beside one that floods at its quotas.
- `strangers`: 5,000 begun handshakes a second: the acknowledgements of another client, and the
  memory of the front.

`ONLY=curve,login` takes a part. Others' load distorts what waits for a free core most: the
percentiles of `tenants` and `strangers`. The processor time of the flooding tenant's own process is
part of it, as it runs on this host.
"""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import psutil
import zmq

from bench.conditions import Conditions
from bench.measure import RESULTS, percentile
from tailrace import Admin, NewTopic, Producer, QuotaEntity
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

ROUNDS = int(os.environ.get("ROUNDS", "5"))
MEGABYTES = int(os.environ.get("MB", "32"))
ACKS = int(os.environ.get("ACKS", "300"))
LOGINS = int(os.environ.get("LOGINS", "20"))
USERS = int(os.environ.get("USERS", "100000"))
RULES = int(os.environ.get("RULES", "10000"))
STRANGERS = int(os.environ.get("STRANGERS", "5000"))
SECONDS = float(os.environ.get("SECONDS", "5"))
ONLY = os.environ.get("ONLY", "curve,rules,login,catalog,tenants,strangers").split(",")
FLOOD_BYTES_A_SECOND = 8 << 20
FLOOD_REQUESTS_A_SECOND = 500
FLOOD_CONNECTIONS = 4
TOPIC = "secured"
CONFIGS = {"retention.bytes": 256 << 20, "max.message.bytes": 2_000_000}
Figures = list[dict[str, Any]]


class Side(NamedTuple):
    """An appliance and the address that its client uses."""

    appliance: EmbeddedAppliance
    address: str

    @property
    def fronts(self) -> list[psutil.Process]:
        children = psutil.Process(self.appliance.pid).children(recursive=True)
        return [child for child in children if child.name().startswith("tr-front")]


class Cost(NamedTuple):
    """Time and CPU of a piece of work."""

    seconds: float
    cpu_seconds: float
    """CPU of the fronts and of this process."""


def report(name: str, unit: str, values: list[float], goal: str, found: Figures) -> None:
    """Print a row and add it to `found`."""
    median = statistics.median(values)
    print(
        f"{name:<58} {median:>10,.2f} {min(values):>9,.2f} {max(values):>9,.2f}  {unit:<8} {goal}"
    )
    sys.stdout.flush()
    found.append({"name": name, "unit": unit, "median": median, "goal": goal, "values": values})


@contextmanager
def running(listen: str = "", **settings: Any) -> Iterator[EmbeddedAppliance]:
    with tempfile.TemporaryDirectory(prefix="tailrace-security-") as directory:
        found = start_embedded(
            data_dir=f"{directory}/data", settings=settings,
            listen=listen.replace("DIR", directory) or "tcp://127.0.0.1:0",
        )  # fmt: skip
        try:
            yield found
        finally:
            found.stop()


def administrator(appliance: EmbeddedAppliance) -> str:
    return f"context:{appliance.data_dir}/admin.context#{appliance.address}"


@contextmanager
def pair() -> Iterator[tuple[Side, Side]]:
    """A plain appliance, and one with users and encryption."""
    with running() as plain, running(**{"security.enabled": "true"}) as secured:
        sides = Side(plain, plain.address), Side(secured, administrator(secured))
        for side in sides:
            with Admin(side.address) as admin:
                admin.create_topics(NewTopic(TOPIC, configs=CONFIGS))
        yield sides


def measured(side: Side, work: Callable[[], None]) -> Cost:
    fronts = side.fronts

    def cpu() -> float:
        return time.process_time() + sum(sum(front.cpu_times()[:2]) for front in fronts)

    begun_cpu, begun = cpu(), time.perf_counter()
    work()
    return Cost(time.perf_counter() - begun, cpu() - begun_cpu)


def sending(side: Side, producer: Producer, size: int) -> Cost:
    """MEGABYTES as records that fill a batch each."""
    value = os.urandom(size)

    def work() -> None:
        for _ in range((MEGABYTES << 20) // size):
            producer.send(TOPIC, value)
        producer.flush()

    return measured(side, work)


def acks_us(producer: Producer, count: int = ACKS, topic: str = TOPIC) -> list[float]:
    """Round trips of single records, one after the other."""
    found = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        producer.send(topic, b"x" * 100).result(60)
        found.append((time.perf_counter_ns() - begun) / 1e3)
    return found


def compare(sides: tuple[Side, Side], names: str, goals: dict[str, str], found: Figures) -> None:
    """Rates and round trips of the second side against the first one."""
    for size in (64 << 10, 1 << 20):
        with ExitStack() as stack:
            producers = [
                stack.enter_context(
                    Producer(side.address, batch_size=size, linger_ms=0, max_request_size=4 << 20)
                )
                for side in sides
            ]
            for side, producer in zip(sides, producers, strict=True):
                sending(side, producer, size)
            rates, costs = [], []
            for _ in range(ROUNDS):
                one, other = (
                    sending(side, producer, size)
                    for side, producer in zip(sides, producers, strict=True)
                )
                rates.append(one.seconds / other.seconds)
                costs.append(other.cpu_seconds / one.cpu_seconds)
        text = f"{names}, batches of {size >> 10} KiB"
        report(f"{text}: rate", "ratio", rates, goals[f"{size >> 10}"], found)
        report(f"{text}: processor time", "ratio", costs, "", found)
    with ExitStack() as stack:
        producers = [
            stack.enter_context(Producer(side.address, linger_ms=0, acks=1)) for side in sides
        ]
        for producer in producers:
            acks_us(producer)
        more, cost = [], []
        for _ in range(ROUNDS):
            trips: list[list[float]] = [[], []]
            spent = [0.0, 0.0]
            for _ in range(6):
                for number, (side, producer) in enumerate(zip(sides, producers, strict=True)):
                    took = measured(side, lambda p=producer, t=trips[number]: t.extend(  # type: ignore[misc]
                        acks_us(p, ACKS // 6)))  # fmt: skip
                    spent[number] += took.cpu_seconds
            medians = [statistics.median(each) for each in trips]
            more.append(medians[1] - medians[0])
            cost.append((spent[1] - spent[0]) / (ACKS // 6 * 6) * 1e6)
        report(f"{names}, ack of one record: p50 more", "us", more, goals["ack"], found)
        report(f"{names}, ack of one record: processor time more", "us", cost, "", found)


def curve(found: Figures) -> None:
    with pair() as sides:
        goals = {"64": "0.55", "1024": "0.45", "ack": "40"}
        compare(sides, "CURVE against plain", goals, found)


def rules(found: Figures) -> None:
    """The account of this process stands for a user with many ACLs."""
    with (
        running("ipc://DIR/plain.sock") as plain,
        running("ipc://DIR/users.sock", **{"security.enabled": "true"}) as secured,
    ):
        with Admin(plain.address) as admin:
            admin.create_topics(NewTopic(TOPIC, configs=CONFIGS))
        with Admin(secured.address) as admin:
            admin.create_topics(NewTopic(TOPIC, configs=CONFIGS))
            acls = [
                {"principal": "User:many", "operation": "write", "resource_type": "topic",
                 "permission": "allow", "name": f"other{number}.", "pattern": "prefixed"}
                for number in range(RULES - 1)
            ]  # fmt: skip
            for at in range(0, len(acls), 1_000):
                admin.add_acls(acls[at : at + 1_000])
            admin.add_acls([{**acls[0], "name": TOPIC, "pattern": "literal"}])
            admin.add_user("many", accounts=[os.geteuid()])
        sides = Side(plain, plain.address), Side(secured, secured.address)
        goals = {"64": "0.98", "1024": "0.98", "ack": "5"}
        compare(sides, f"{RULES:,} ACLs against none", goals, found)


def login(found: Figures) -> None:
    with pair() as sides:
        ratios = []
        for _ in range(ROUNDS):
            took: list[list[float]] = [[], []]
            for _ in range(LOGINS):
                for number, side in enumerate(sides):
                    begun = time.perf_counter()
                    with Producer(side.address, linger_ms=0, acks=1) as producer:
                        producer.send(TOPIC, b"x").result(60)
                        took[number].append(time.perf_counter() - begun)
            ratios.append(statistics.median(took[1]) / statistics.median(took[0]))
        report("login to the first ack, against plain", "ratio", ratios, "1.2", found)


def filled(directory: str) -> None:
    """Write USERS users with a key each, and as many ACLs, into a catalog."""
    key = zmq.curve_keypair()[0].decode()
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
    database = sqlite3.connect(f"{directory}/coordinator.db")
    with database:
        for number in range(USERS):
            name = f"user{number:06}"
            tail = "".join(alphabet[number // 36**place % 36] for place in range(5))
            database.execute("INSERT INTO users VALUES (?, 0, 0, '[]', '', 1)", (name,))
            database.execute(
                "INSERT INTO user_keys VALUES (?, 'first', ?, 1, 0)", (name, f"0{key[1:35]}{tail}")
            )
            database.execute(
                "INSERT INTO acls (principal, resource_type, pattern, name, operation, is_allowed,"
                " host) VALUES (?, 'topic', 'literal', ?, 'write', 1, '*')",
                (f"User:{name}", f"t{number}"),
            )
    database.close()


def catalog(found: Figures) -> None:
    """Starts of two directories in turn, then changes."""
    with tempfile.TemporaryDirectory(prefix="tailrace-security-") as root:
        settings = {"security.enabled": "true"}
        directories = [f"{root}/empty", f"{root}/full"]
        for directory in directories:
            start_embedded(data_dir=directory, settings=settings).stop()
        filled(directories[1])
        more, cost, changes = [], [], []
        for _ in range(ROUNDS):
            took, spent = [], []
            for directory in directories:
                begun = time.perf_counter()
                appliance = start_embedded(data_dir=directory, settings=settings)
                try:
                    with Admin(administrator(appliance)) as admin:
                        admin.list_topics()
                        took.append((time.perf_counter() - begun) * 1e3)
                        spent.append(cpu_ms(appliance))
                        if directory == directories[1]:
                            changes += [changed_ms(admin, number) for number in range(5)]
                finally:
                    appliance.stop()
            more.append(took[1] - took[0])
            cost.append(spent[1] - spent[0])
        text = f"{USERS:,} users and ACLs"
        report(f"{text}: start to the first answer, more", "ms", more, "150", found)
        report(f"{text}: processor time of the start, more", "ms", cost, "", found)
        report(f"{text}: a change", "ms", changes, "50", found)


def cpu_ms(appliance: EmbeddedAppliance) -> float:
    """Processor time of all processes of an appliance so far."""
    children = psutil.Process(appliance.pid).children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children) * 1e3


def changed_ms(admin: Admin, number: int) -> float:
    acl = {
        "principal": "User:user000001", "operation": "read", "resource_type": "topic",
        "permission": "allow", "name": f"new{number}", "pattern": "literal",
    }  # fmt: skip
    begun = time.perf_counter()
    admin.add_acls([acl])
    took = (time.perf_counter() - begun) * 1e3
    admin.remove_acls([acl])
    return took


def context_of(appliance: EmbeddedAppliance, admin: Admin, user: str, topic: str) -> str:
    """The address of a new user who may write to a topic."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    acl = {
        "principal": f"User:{user}", "resource_type": "topic", "permission": "allow",
        "pattern": "literal", "name": topic,
    }  # fmt: skip
    admin.add_user(user, public_key=public)
    admin.add_acls([{**acl, "operation": operation} for operation in ("write", "describe")])
    own = json.loads(pathlib.Path(appliance.data_dir, "admin.context").read_text())
    path = f"{appliance.data_dir}/{user}.context"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
        json.dump({**own, "user": user, "public_key": public, "secret_key": secret}, file)
    return f"context:{path}#{appliance.address}"


def tenants(found: Figures) -> None:
    """The flooding one is at its quotas of bytes and requests, over several connections. It begins
    with a second's amount in hand, so it uses more than its rate in a few seconds.
    """
    with running(**{"security.enabled": "true"}) as appliance:
        with Admin(administrator(appliance)) as admin:
            admin.create_topics([NewTopic(name, configs=CONFIGS) for name in ("quiet", "flood")])
            quiet = context_of(appliance, admin, "quiet", "quiet")
            flood = context_of(appliance, admin, "flood", "flood")
            rates = {
                "producer_byte_rate": FLOOD_BYTES_A_SECOND, "request_rate": FLOOD_REQUESTS_A_SECOND
            }  # fmt: skip
            admin.alter_quotas({QuotaEntity(user="flood"): rates})
        halves, tails, used = [], [], []
        with Producer(quiet, linger_ms=0, acks=1) as producer:
            acks_us(producer, topic="quiet")
            for _ in range(ROUNDS):
                alone = acks_us(producer, 3 * ACKS, "quiet")
                flooding = subprocess.Popen(
                    [sys.executable, "-P", "-m", "bench.flooding_tenant", flood, "flood",
                     str(FLOOD_CONNECTIONS), str(SECONDS)],
                    stdout=subprocess.PIPE,
                )  # fmt: skip
                beside: list[float] = []
                while flooding.poll() is None:
                    beside += acks_us(producer, 20, "quiet")
                assert flooding.stdout is not None
                sent, _waits = map(int, flooding.stdout.read().split())
                used.append(sent / SECONDS / FLOOD_BYTES_A_SECOND)
                halves.append(statistics.median(beside) / statistics.median(alone))
                tails.append(percentile(beside, 0.99) / percentile(alone, 0.99))
        text = "a quiet tenant beside a flooding one"
        report("share of its rate that the flooding tenant used", "ratio", used, "", found)
        report(f"{text}: p50 of its acks", "ratio", halves, "", found)
        report(f"{text}: p99 of its acks", "ratio", tails, "1.5", found)


def strangers(found: Figures) -> None:
    with running(**{"security.enabled": "true"}) as appliance:
        side = Side(appliance, administrator(appliance))
        host, _, port = appliance.address.removeprefix("tcp://").rpartition(":")
        with Admin(side.address) as admin:
            admin.create_topics(NewTopic(TOPIC))
        ratios, rates, shares = [], [], []
        with Producer(side.address, linger_ms=0, acks=1) as producer:
            acks_us(producer)
            [front] = side.fronts
            before = front.memory_info().rss
            for _ in range(ROUNDS):
                alone = percentile(acks_us(producer, 3 * ACKS), 0.99)
                flood = subprocess.Popen(
                    [sys.executable, "-P", "-m", "bench.strangers", host, port, str(STRANGERS),
                     str(SECONDS)],
                    stdout=subprocess.PIPE,
                )  # fmt: skip
                trips: list[float] = []
                while flood.poll() is None:
                    trips += acks_us(producer, 20)
                assert flood.stdout is not None
                begun, taken, seconds = map(float, flood.stdout.read().split())
                rates.append(begun / seconds)
                shares.append(taken / begun)
                ratios.append(percentile(trips, 0.99) / alone)
            grown = (front.memory_info().rss - before) / 1e6
        report("strangers: handshakes begun a second", "1/s", rates, "5000", found)
        report("strangers: share that was taken", "ratio", shares, "", found)
        report("strangers: p99 of others' acks", "ratio", ratios, "1.5", found)
        report("strangers: memory of the front, more", "MB", [grown], "50", found)


def main() -> None:
    conditions = Conditions()
    print(conditions.sentence())
    print(f"{'':<58} {'median':>10} {'least':>9} {'most':>9}  {'':<8} goal")
    found: Figures = []
    for part in (curve, rules, login, catalog, tenants, strangers):
        if part.__name__ in ONLY:
            part(found)
    measured_under = conditions.report()
    content = {"conditions": measured_under, "rounds": ROUNDS, "figures": found}
    path = RESULTS / f"security-{measured_under['date']}-{measured_under['commit'][:7]}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
