"""Commands of users of little rights: each works with the rights that `docs/security.md` names for
it, leaves out with a word what needs more, and without them says in a sentence which one lacks.
"""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from tailrace import Consumer, NewTopic, Producer
from tests.kit.appliances.secured import Place, Users, admin_address, new_keys, secured
from tests.kit.cli import run

READS = ("read topic orders",)
IN_A_GROUP = (*READS, "read group billing")
OF_CLUSTER = ("describe cluster",)
OF_CONFIGS = ("describe-configs cluster",)
SETS_CONFIGS = ("alter-configs cluster",)
ADMINISTERS = ("alter cluster",)
REDRIVES = (
    "read topic orders.dlq",
    "write topic orders",
    "read group redrive.orders.dlq",
    "write transactional-id redrive.orders.dlq",
)
COUNT = ["sql", "select count(*) from orders"]
RULE = "--principal User:billing --operation read --topic orders"


class Row(NamedTuple):
    """A command, and the rights that are enough for it."""

    words: str | list[str]
    rights: tuple[str, ...]
    left_out: str = ""
    """Word about what is left out without further rights."""
    status: int = 0

    def arguments(self, directory: pathlib.Path) -> list[str]:
        words = self.words.split() if isinstance(self.words, str) else self.words
        return [word.format(directory=directory, key=new_keys()[0]) for word in words]


# In this order: some make what others change.
COMMANDS = [
    Row("produce orders", ("write topic orders", "idempotent-write cluster")),
    Row("produce orders", ("write topic orders",)),
    Row("perf produce --topic orders --num-records 9 --record-size 9", ("write topic orders",)),
    Row("consume orders --group billing --from-beginning --max 1", IN_A_GROUP),
    Row("consume orders --from-beginning --max 1", READS),
    Row("consume orders --tail 1", READS),
    Row("perf consume --topic orders --messages 1", READS),
    Row(COUNT, READS),
    Row("export orders --to {directory}/lake", READS),
    Row("topic list", ("describe topic orders",)),
    Row("topic describe orders", READS),
    Row("topic describe orders", ("describe topic orders",), "times of the oldest records"),
    Row("topic describe orders --json", ("describe topic orders",), "times of the oldest records"),
    Row("topic schema typed", ("describe topic typed",)),
    Row("topic create mine", ("create topic mine",)),
    Row("topic alter orders --config retention.ms=90000000", ("alter-configs topic orders",)),
    Row("topic alter spare --partitions 3", ("alter topic spare",)),
    Row("topic compact compacted", ("alter topic compacted",)),
    Row("topic delete-records spare --partition 0 --before 0 --yes", ("delete topic spare",)),
    Row("topic delete spare --yes", ("delete topic spare",), "the time in which it can be undone"),
    Row("topic list --deleted", ("describe topic spare",)),
    Row("topic undelete spare", ("create topic spare",)),
    Row("topic delete spare --yes", ("delete topic spare", *OF_CONFIGS)),
    Row("topic purge spare --yes", ("delete topic spare",)),
    Row("topic redrive orders.dlq --to orders", REDRIVES),
    Row("group list", ("describe group billing",)),
    Row("group describe billing", ("describe group billing",)),
    Row("group advise billing --seconds 1", ("describe group billing", "describe topic orders")),
    Row("group reset-offsets billing --topic orders --to-earliest --yes", IN_A_GROUP),
    Row("group delete spare --yes", ("delete group spare",)),
    Row("transaction list", ("describe transactional-id t",)),
    Row("transaction describe t", ("describe transactional-id t",)),
    Row("transaction find-hanging", ("describe transactional-id t",)),
    Row("transaction abort t --yes", ("write transactional-id t",)),
    Row("delay list later", ("read topic later", "describe delay later")),
    Row("status", OF_CLUSTER, "settings that wait"),
    Row("status --json", OF_CLUSTER, "quotas that are reached"),
    Row("status", (*OF_CLUSTER, *OF_CONFIGS)),
    Row("doctor", OF_CLUSTER, "settings that wait"),
    Row("top --once", OF_CLUSTER),
    Row("config show --running", OF_CONFIGS),
    Row("config diff {directory}/empty.toml", OF_CONFIGS, status=1),
    Row("config set topic.segment.bytes=16777216", SETS_CONFIGS),
    Row("config unset topic.segment.bytes", SETS_CONFIGS),
    Row("reload", SETS_CONFIGS),
    Row("quota list", OF_CONFIGS),
    Row("quota list --usage", OF_CONFIGS),
    Row("quota set --user x producer_byte_rate=1000000", SETS_CONFIGS),
    Row("quota remove --user x", SETS_CONFIGS),
    Row("user list", OF_CLUSTER),
    Row("user add billing --public-key {key}", ADMINISTERS),
    Row(f"acl add {RULE}", ADMINISTERS),
    Row("acl list", OF_CLUSTER),
    Row("acl test User:billing read topic:orders", OF_CLUSTER),
    Row(f"acl remove {RULE}", ADMINISTERS),
    Row("user delete billing", ADMINISTERS),
]
SHOWS_WHAT_IS_SEEN = ("topic list", "group list", "transaction list", "transaction find-hanging")
"""Commands that need no right: they list what their user may describe."""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    directory = tmp_path_factory.mktemp("users")
    settings: dict[str, Any] = {"topic.delete.retention.ms": 3_600_000}
    with secured(directory, **settings) as found:
        typed = pa.schema([("n", pa.int64())])
        found.admin.create_topics(
            [
                NewTopic("orders", 2),
                NewTopic("spare"),
                NewTopic("orders.dlq"),
                NewTopic("typed", schema=typed),
                NewTopic("compacted", configs={"cleanup.policy": "compact"}),
                NewTopic("later", configs={"delay.enabled": True}),
            ]
        )
        address = admin_address(found.appliance)
        with Producer(bootstrap=address, transactional_id="t") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            for topic in ("orders", "spare", "orders.dlq", "compacted"):
                producer.send(topic, key=b"k", value=b"v")
            producer.commit_transaction()
        for group in ("billing", "spare"):
            with Consumer(
                "orders", bootstrap=address, group_id=group, auto_offset_reset="earliest"
            ) as consumer:
                while not consumer.poll(1_000):
                    pass
                consumer.commit()
        yield found


def run_row(row: Row, address: str, directory: pathlib.Path) -> subprocess.CompletedProcess[bytes]:
    place: Any = Place(address)
    return run(place, *row.arguments(directory), stdin=b"hello\n", status=None)


@pytest.mark.slow_because("some sixty commands in a row, of a user each")
def test_a_command_works_with_the_rights_that_are_named_for_it(
    users: Users, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "empty.toml").touch()
    for number, row in enumerate(COMMANDS):
        address = users.add(f"user-{number}", *row.rights)
        done = run_row(row, address, tmp_path)
        said = done.stderr.decode()
        assert "NOT_AUTHORIZED" not in said, row
        if row.words != "doctor":  # 1 if this host has a problem
            assert done.returncode == row.status, (row, said)
        notes = [line for line in said.splitlines() if line.startswith("left out: ")]
        assert bool(notes) is bool(row.left_out), (row, said)
        assert row.left_out in "".join(notes), (row, notes)


@pytest.mark.slow_because("some sixty commands in a row")
def test_without_rights_a_command_says_in_a_sentence_which_one_lacks(
    users: Users, tmp_path: pathlib.Path
) -> None:
    address = users.add("nobody")
    (tmp_path / "empty.toml").touch()
    for row in COMMANDS:
        done = run_row(row, address, tmp_path)
        said = done.stderr.decode()
        if isinstance(row.words, str) and row.words.startswith(SHOWS_WHAT_IS_SEEN):
            assert not done.returncode, (row, said)
            continue
        assert done.returncode == 1, (row, said)
        sentences = [line for line in said.splitlines() if line.startswith("tailrace: ")]
        assert len(sentences) == 1, (row, said)
        assert ("may not " in sentences[0]) is not ("there is no topic" in sentences[0]), row
