"""The driver's commit of one batch: decides it, publishes it, and records that it is published. It
also finishes a batch that another driver began.

    no manifest --begin--> decided --publish--> all in the targets' logs --done--> published

    roll forward: the next driver publishes a decided batch, as often as needed
    void: a decided batch that cannot be finished, and has nothing in a log, is given up;
          then the present batch is begun

A batch is identified by the sink's name and the batch's number. A batch that is published is not
published again, and its staged rows are dropped. A batch that is decided and not finished is
finished as it was decided, and rows that another attempt has staged are dropped. A new run of the
query first writes a claim to the log; the run before it is refused from then on.

Owner: one commit, in a process of the Spark driver.
Invariants:
- A decided batch is published once, however many drivers publish it, and however often.
- Batch N + 1 is begun only when N is published.
Crash: at any place; see `spark_bridge.sink.publish` for the recovery.

Iceberg's and Delta's streaming sinks skip a batch by the number in their table's last commit. Here
the decision log has that number.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

from spark_bridge.sink.batch_sender import BatchSender, UndecidedError
from spark_bridge.sink.decision_log import (
    EPOCH_MAX,
    UNKNOWN_ROWS,
    DecisionLog,
    Manifest,
    Stage,
    State,
    Target,
    known,
    taken_over,
)
from spark_bridge.sink.publish import (
    UNFINISHED_ADVICE,
    StagedRowsLostError,
    TopicReplacedError,
    progress,
    publish,
    question,
    target_info,
)
from spark_bridge.sink.staged_batches import CLIENT_ID, Sources
from spark_bridge.sink.staging import Staged, combined
from tailrace.admin.admin import Admin
from tailrace.client.list_offsets import ready_offsets
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, SchemaMismatchError, TailraceError, error_for
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api

logger = logging.getLogger("tailrace.spark")
CRASH_VARIABLE = "TAILRACE_SINK_CRASH"
"""Environment variable of tests: `point` or `point:batch`, a place where the driver is killed:
after_staging, after_manifest, in_publish, before_done, after_done.
"""
ATTEMPTS = 50
PAUSE_S = 0.1
TIDY_BATCHES = 16
TIDY_ROWS = 200_000
"""Batches, or rows of one batch, after which staged rows are deleted."""


DIFFERS = (
    "nothing of it is written. Rows may be missing if the query's source does not give the "
    "same rows again, or if its checkpoint is a copy"
)


class Fenced(InvalidRequestError):
    """Another run of the same query has taken over."""


def crash_point(name: str, batch_id: int) -> None:
    """Kill the driver here, if a test asks for it."""
    if is_armed(name, batch_id):
        for process in _ancestors_of_java() or [os.getpid()]:
            os.kill(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def is_armed(name: str, batch_id: int) -> bool:
    """True if the driver must be killed at this place."""
    return os.environ.get(CRASH_VARIABLE, "") in (name, f"{name}:{batch_id}")


def _ancestors_of_java() -> list[int]:
    """Process id of the JVM that this process belongs to, if any."""
    process = os.getpid()
    while process > 1:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return [process]
        process = int(rest.split()[1])
    return []


class Committer:
    """Commits batches of one sink, in one process; `close` it."""

    def __init__(self, bootstrap: str, timeout_ms: int) -> None:
        self.admin = Admin(bootstrap, client_id=CLIENT_ID, connect_timeout_ms=timeout_ms)
        self.sources = Sources(self.admin, timeout_ms)
        self._bootstrap = bootstrap
        self._timeout_ms = timeout_ms
        self._senders = [BatchSender(bootstrap, CLIENT_ID, timeout_ms)]
        self._unconfirmed = -1
        """Number of the target whose partition cannot tell whether it has a batch."""

    @property
    def log_sender(self) -> BatchSender:
        """The sender for the decision log."""
        return self._senders[0]

    def close(self) -> None:
        """End all connections."""
        self.sources.close()
        for sender in self._senders:
            sender.close()
        self.admin.close()

    def commit(self, log: DecisionLog, run: str, batch_id: int, staged: list[Staged]) -> bool:
        """Publish a batch; False: it was published already. Raises Fenced, TailraceError."""
        rows = sum(each.rows for each in staged)
        for _ in range(ATTEMPTS):
            state = log.read()
            run = run or state.run
            if run in state.fenced:
                raise Fenced(
                    f"another run of this query has taken over at batch {state.published + 1}, "
                    "and this one may not write any more: stop it, and give each query a "
                    "checkpoint of its own"
                )
            if log.is_of_query and batch_id < state.published:
                raise InvalidRequestError(_older(batch_id, state.published))
            if taken_over(state, run) is not state and state.at >= 0:
                log.append(state, "claim", taken_over(state, run))
                continue
            if state.manifest is not None:
                self._finish(log, state, state.manifest)
                continue
            if batch_id <= state.published:
                logger.info("sink_batch_repeated batch=%d published=%d", batch_id, state.published)
                if batch_id == state.published and state.rows not in (rows, UNKNOWN_ROWS):
                    logger.warning(
                        "sink_batch_differs batch=%d rows=%d published_rows=%d: %s",
                        batch_id,
                        rows,
                        state.rows,
                        DIFFERS,
                    )
                return False
            if not rows:
                return True  # a repetition has no rows either
            following = self._decided(state, run, batch_id, staged)
            if log.append(state, "begin", following):
                crash_point("after_manifest", batch_id)
                state = log.read()
                if state.manifest is None or state.manifest != following.manifest:
                    continue  # another driver has finished it meanwhile, or gone on
                self._publish(log, state, state.manifest, {})
                if log.read().published >= batch_id:
                    crash_point("after_done", batch_id)
                    if batch_id % TIDY_BATCHES == 0 or rows >= TIDY_ROWS:
                        self._tidy(log, state.manifest)
                    return True
        raise error_for(
            ErrorCode.NOT_READY,
            f"batch {batch_id} was disturbed {ATTEMPTS} times by other drivers of the same "
            "query: run one driver of a query at a time",
        )

    # ---- deciding --------------------------------------------------------------------------------

    def _decided(self, state: State, run: str, batch_id: int, staged: list[Staged]) -> State:
        targets, stages = combined(staged)
        infos = known(self.admin, list(dict.fromkeys(topic for topic, _, _, _ in targets)))
        if any(
            version and topic in infos and infos[topic].slot_map_version != version
            for topic, _, _, version in targets
        ):
            raise error_for(
                ErrorCode.STALE_SLOT_MAP,
                "partitions were added to a topic while the batch was staged: repeat the batch",
            )
        rows = [0] * len(targets)
        for batches in stages.values():
            for _, count, target in batches:
                rows[target] += count
        ends = self._bounds(
            [(topic, topic_id, partition) for topic, topic_id, partition, _ in targets]
        )
        producer_id, epoch = self._identity(state)
        manifest = Manifest(
            batch_id, producer_id, epoch,
            tuple(Target(*target, ends[number][1] if number in ends else 0,
            rows[number]) for number, target in enumerate(targets)),
            tuple(Stage(*key, tuple(batches)) for key, batches in stages.items()),
        )  # fmt: skip
        return replace(state, run=run, producer_id=producer_id, epoch=epoch, manifest=manifest)

    def _identity(self, state: State) -> tuple[int, int]:
        """A producer id and an epoch that no manifest has had. The sink has its own producer id,
        whose epochs are counted in its log.
        """
        if state.producer_id >= 0 and state.epoch < EPOCH_MAX:
            return state.producer_id, state.epoch + 1
        answer = self.log_sender.call_json(Api.INIT_PRODUCER_ID, {})
        return int(answer["producer_id"]), int(answer["producer_epoch"])

    def _bounds(self, targets: list[tuple[str, str, int]]) -> dict[int, tuple[int, int]]:
        """Number of a target -> (beginning, end) of the partition's log; deleted topics are left
        out.
        """
        infos = known(self.admin, list(dict.fromkeys(topic for topic, _, _ in targets)))
        keys = {
            number: TopicPartition(topic, partition)
            for number, (topic, topic_id, partition) in enumerate(targets)
            if topic in infos and infos[topic].topic_id.hex() == topic_id
        }
        found = ready_offsets(self.admin.offsets, keys.values(), "latest", self._timeout_ms)
        return {
            number: (found[key]["beginning"], found[key]["end"]) for number, key in keys.items()
        }

    # ---- publishing ------------------------------------------------------------------------------

    def _infos(self, manifest: Manifest) -> dict[str, TopicInfo]:
        return known(
            self.admin,
            list(
                dict.fromkeys(
                    [t.topic for t in manifest.targets] + [s.topic for s in manifest.stages]
                )
            ),
        )

    def _progress(self, manifest: Manifest, infos: Mapping[str, TopicInfo]) -> dict[int, int]:
        bounds = self._bounds([target.key for target in manifest.targets])
        return progress(manifest, infos, bounds, self.sources.of)

    def _publish(
        self, log: DecisionLog, state: State, manifest: Manifest, present: Mapping[int, int]
    ) -> None:
        """Send what is missing, then record the batch as published. A driver that is disturbed
        returns, to read the state again.
        """
        sender = BatchSender(self._bootstrap, CLIENT_ID, self._timeout_ms)
        self._senders.append(sender)

        def at(place: str) -> None:
            if is_armed(place, manifest.batch_id):
                sender.drain()  # everything sent so far must be in the log
                crash_point(place, manifest.batch_id)

        try:
            publish(manifest, self._infos(manifest), self.sources.of, sender, present, at)
        except UndecidedError as error:
            logger.warning("sink_undecided batch=%d reason=%r", manifest.batch_id, str(error))
            lane = (error.lane.topic.topic_id.hex(), error.lane.partition)
            self._unconfirmed = next(
                n
                for n, target in enumerate(manifest.targets)
                if (target.topic_id, target.partition) == lane
            )
            time.sleep(PAUSE_S)  # another driver may be publishing it
            return
        finally:
            sender.close()
            self._senders.remove(sender)
        crash_point("before_done", manifest.batch_id)
        published = replace(
            state,
            published=manifest.batch_id,
            rows=sum(target.rows for target in manifest.targets),
            manifest=None,
        )
        log.append(state, "done", published)

    def _finish(self, log: DecisionLog, state: State, manifest: Manifest) -> None:
        """Take one step towards the end of a publication that was begun before, perhaps by another
        driver that is still active.
        """
        infos = self._infos(manifest)
        present = self._progress(manifest, infos)
        logger.info("sink_rolls_forward batch=%d present=%r", manifest.batch_id, present)
        try:
            self._publish(log, state, manifest, present)
        except (
            TopicReplacedError,
            StagedRowsLostError,
            SchemaMismatchError,
            TailraceError,
        ) as error:
            if not _cannot_be_finished(error):
                raise
            self._abandon(log, state, manifest, error)
            return
        seen, unconfirmed = log.read(), self._unconfirmed
        if seen.manifest == manifest and self._is_forgotten(manifest, infos):
            self._amend(log, seen, manifest, unconfirmed)

    def _amend(self, log: DecisionLog, seen: State, manifest: Manifest, number: int) -> None:
        """Continue under another epoch in a partition that has forgotten the manifest's producer
        and appends no more of it. All other partitions keep their epoch, by which they recognise
        batches that were just sent and are not visible yet.
        """
        present = self._progress(manifest, self._infos(manifest))[number]
        target = manifest.targets[number]
        identity = self._identity(seen)
        end = self._bounds([target.key])[0][1]
        amended = replace(target, skip=target.skip + present, start=end, identity=identity)
        targets = (*manifest.targets[:number], amended, *manifest.targets[number + 1 :])
        following = replace(
            seen,
            producer_id=identity[0],
            epoch=identity[1],
            manifest=replace(manifest, targets=targets),
        )
        log.append(seen, "begin", following)

    def _is_forgotten(self, manifest: Manifest, infos: Mapping[str, TopicInfo]) -> bool:
        """True if the partition with an unknown result knows nothing of the manifest's producer.
        Otherwise another driver is ahead, and its batches must be waited for.
        """
        number, self._unconfirmed = self._unconfirmed, -1
        if number < 0:
            return False
        topic = target_info(manifest.targets[number], infos)
        asking = BatchSender(self._bootstrap, CLIENT_ID, self._timeout_ms, asks=True)
        try:
            asking.add(
                asking.lane(
                    topic, manifest.targets[number].partition, manifest.targets[number].map_version
                ),
                question(manifest, number, topic),
            )
            asking.drain()
        except UndecidedError as error:
            return error.code is ErrorCode.UNKNOWN_SEQUENCE
        finally:
            asking.close()
        raise error_for(
            ErrorCode.INTERNAL_ERROR,
            f"internal error: {topic.name} appended a batch behind a gap; please report it",
        )

    def _abandon(
        self, log: DecisionLog, state: State, manifest: Manifest, error: TailraceError
    ) -> None:
        """End a publication that cannot be finished: void it if nothing of it is in a log."""
        present = self._progress(manifest, self._infos(manifest))
        if any(present.values()) or any(target.skip for target in manifest.targets):
            done = ", ".join(
                f"{present[n] + t.skip} of {t.rows} rows in {t.topic}-{t.partition}"
                for n, t in enumerate(manifest.targets)
            )
            raise type(error)(
                f"batch {manifest.batch_id} is published in part and cannot be finished "
                f"({error.detail}); published are {done}. {UNFINISHED_ADVICE}"
            ) from None
        logger.warning("sink_void batch=%d reason=%r", manifest.batch_id, error.detail)
        log.append(state, "void", replace(state, manifest=None))

    def _tidy(self, log: DecisionLog, manifest: Manifest) -> None:
        """Delete the staged rows of a published batch and those before it. A failure is retried
        with the next batch.
        """
        ends = {
            TopicPartition(stage.topic, stage.partition): stage.batches[-1][0]
            + stage.batches[-1][1]
            for stage in manifest.stages
        }
        try:
            self.admin.delete_records(ends)
            log.trim()
        except TailraceError as error:
            logger.warning("sink_tidy_failed batch=%d reason=%r", manifest.batch_id, error.detail)


def _older(batch_id: int, published: int) -> str:
    return (
        f"batch {batch_id} was to be written, and batch {published} of this query is published "
        "already. Its checkpoint is an older copy, or another query uses the checkpoint or the "
        "queryId, so the rows of this query differ from those written under its batch numbers. "
        "Start it with a checkpoint of its own, and with a queryId of its own where it has "
        "that option"
    )


def _cannot_be_finished(error: TailraceError) -> bool:
    return isinstance(error,
    (TopicReplacedError, StagedRowsLostError, SchemaMismatchError)) or error.code in (
        ErrorCode.STALE_SLOT_MAP, ErrorCode.UNKNOWN_TOPIC, ErrorCode.PARTITION_OUT_OF_RANGE,
        ErrorCode.RECORD_TOO_LARGE,
    )  # fmt: skip
