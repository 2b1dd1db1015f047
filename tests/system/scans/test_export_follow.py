"""Exports beside a log that changes: what retention removed or a disk lost, what is sent later, an
appliance that restarts, a topic that is deleted.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.core.errors import CorruptBatchError, NotReachableError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.export.checkpoint import Commit
from tailrace.export.export import Export, OffsetLost
from tailrace.export.source import TopicSource
from tests.kit.lakes.exports import DAY_MS, entries, rows, run, send, sent, values
from tests.kit.processes import HANG_LIMIT_S

# ---- what was lost -------------------------------------------------------------------------------


def test_what_retention_removed_first_is_said_or_counted(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
        send(appliance, topic, range(10), 1)
        run(appliance, topic, tmp_path)
        send(appliance, topic, range(10, 30), 1)
        admin.delete_records({TopicPartition(topic, 0): 18})
    with pytest.raises(
        OffsetLost, match=f"offsets 10 to 17 of {topic}-0 were removed by retention"
    ):
        run(appliance, topic, tmp_path)
    (commit,) = run(appliance, topic, tmp_path, on_data_loss="skip")
    assert [item[:3] for item in commit.left_out] == [(0, 10, 18)]
    assert rows(tmp_path).column("offset").to_pylist() == [*range(10), *range(18, 30)]
    assert entries(tmp_path)[-1]["left_out"][0][:3] == [0, 10, 18]
    with Admin(appliance.address) as admin:
        send(appliance, topic, range(30, 33), 1)
        admin.delete_records({TopicPartition(topic, 0): 33})
    (commit,) = run(appliance, topic, tmp_path, on_data_loss="skip")
    assert (commit.rows, [item[:3] for item in commit.left_out]) == (0, [(0, 30, 33)])
    assert run(appliance, topic, tmp_path) == []


@pytest.mark.parametrize("is_counted", [True, False])
def test_retention_between_the_look_and_the_plan_is_noticed_by_the_next_look(
    appliance: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    is_counted: bool,
) -> None:
    planned = TopicSource.plan
    done: list[bool] = []

    def plan_late(self: TopicSource, *arguments: Any) -> Any:
        if not done:
            with Admin(appliance.address) as admin:
                admin.delete_records({TopicPartition(topic, 0): 4})
            done.append(True)
        return planned(self, *arguments)

    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    send(appliance, topic, range(10), 1)
    monkeypatch.setattr(TopicSource, "plan", plan_late)
    if not is_counted:
        with pytest.raises(OffsetLost, match=f"offsets 0 to 3 of {topic}-0"):
            run(appliance, topic, tmp_path)
        return
    (commit,) = run(appliance, topic, tmp_path, on_data_loss="skip")
    assert (commit.rows, [item[:3] for item in commit.left_out]) == (6, [(0, 0, 4)])
    assert rows(tmp_path).column("offset").to_pylist() == [*range(4, 10)]


def test_damage_ends_it_behind_what_is_good_or_is_skipped_and_counted(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic(topic)])
        for n in range(6):
            producer.send(topic, b"v%d" % n * 50).result(60)
    (segment,) = pathlib.Path(appliance.data_dir, f"{topic}-0").glob("*.arrows")
    data = segment.read_bytes()
    at = data.index(b"v3v3v3")
    segment.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with pytest.raises(
        CorruptBatchError, match=r"offsets 3 to 3 are damaged .*--on-data-loss skip"
    ):
        run(appliance, topic, tmp_path)
    assert rows(tmp_path).column("offset").to_pylist() == [0, 1, 2]
    (commit,) = run(appliance, topic, tmp_path, on_data_loss="skip")
    assert [item[:3] for item in commit.left_out] == [(0, 3, 4)]
    assert rows(tmp_path).column("offset").to_pylist() == [0, 1, 2, 4, 5]


# ---- for as long as it is told to ----------------------------------------------------------------


class Following:
    """A continuous export in a thread."""

    def __init__(
        self, appliance: EmbeddedAppliance, topic: str, directory: pathlib.Path, **settings: Any
    ) -> None:
        self.stop = threading.Event()
        self.commits: list[Commit] = []
        self._news = threading.Condition()
        export = Export(topic, str(directory), appliance.address, follow=True, **settings)

        def follow() -> None:
            for commit in export.run(self.stop):
                with self._news:
                    self.commits.append(commit)
                    self._news.notify_all()

        self._thread = threading.Thread(target=follow)

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop.set()
        self._thread.join(HANG_LIMIT_S)
        assert not self._thread.is_alive()

    def wait_for(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(
                lambda: sum(commit.rows for commit in self.commits) >= count, 60
            )


def test_a_continuous_export_brings_what_is_sent_later_and_ends_when_told(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    with Following(appliance, topic, tmp_path, max_delay_ms=100) as following:
        send(appliance, topic, range(50))
        following.wait_for(50)
        send(appliance, topic, range(50, 80))
        following.wait_for(80)
    assert values(tmp_path) == sent(80)


def test_sealed_segments_and_whole_commits_do_not_wait_for_the_delay(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address, linger_ms=0) as producer:
        admin.create_topics([NewTopic(topic, 1, {"segment.bytes": 64 << 10})])
        for _ in range(5):
            producer.send(topic, bytes(30_000)).result(60)
    bases = sorted(
        int(path.stem) for path in pathlib.Path(appliance.data_dir, f"{topic}-0").glob("*.arrows")
    )
    assert 0 < bases[-1] < 5
    with Following(appliance, topic, tmp_path / "a", max_delay_ms=DAY_MS) as following:
        following.wait_for(bases[-1])
    assert rows(tmp_path / "a").num_rows == bases[-1]
    with Following(appliance, topic, tmp_path / "b", max_delay_ms=DAY_MS, rows_max=5) as following:
        following.wait_for(5)
    assert rows(tmp_path / "b").num_rows == 5


@pytest.fixture
def restartable(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start_embedded(
        data_dir=str(tmp_path / "data"), listen=f"ipc://{tmp_path}/front", auto_create_topics=False
    )
    yield running
    running.stop()


def test_an_appliance_that_restarts_is_waited_for_and_one_that_stays_away_is_named(
    restartable: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    running, lake = restartable, tmp_path / "lake"
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
    send(running, topic, range(20))
    with Following(running, topic, lake, max_delay_ms=100, request_timeout_ms=500) as following:
        following.wait_for(20)
        running.stop()
        again = start_embedded(
            data_dir=running.data_dir, auto_create_topics=False, listen=running.address
        )
        send(again, topic, range(20, 30))
        following.wait_for(30)
    with closing(
        Export(topic, str(tmp_path / "other"), running.address, rows_max=7).run()
    ) as commits:
        next(commits)
        again.stop()  # what was planned is read on from the files
        assert sum(commit.rows for commit in commits) == 23
    assert values(lake) == values(tmp_path / "other") == sent(30)
    with pytest.raises(NotReachableError, match=running.address):
        run(again, topic, lake, request_timeout_ms=300)
    assert values(lake) == sent(30)


def test_a_topic_that_is_deleted_ends_a_continuous_export_with_its_name(
    appliance: EmbeddedAppliance, tmp_path: pathlib.Path, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 2)])
        send(appliance, topic, range(10))
        with closing(
            Export(topic, str(tmp_path), appliance.address, follow=True, max_delay_ms=1).run()
        ) as commits:
            taken = 0
            while taken < 10:
                taken += next(commits).rows
            admin.delete_topics([topic])
            with pytest.raises(UnknownTopicError, match=topic):
                next(commits)
    assert values(tmp_path) == sent(10)
