"""The driver's commit of one batch: decides it, publishes it, says that it is published; or finishes what another began.

    no manifest  --begin--> decided --publish--> all in the targets' logs --done--> published
                               '--roll forward, by whoever comes next, as often as it takes--'
                               '--void, when it cannot be finished and nothing of it is in a log: then the batch that is there is begun--'

A batch is known by the sink's name and its number. One that is published is not published again, its staged rows are dropped. One that is decided and not
finished is finished as it was decided: what another attempt has staged meanwhile is dropped. Before anything else a run of the query that is new says so in the
log; the one before it is refused from then on.

Owner: one commit, in a process of the Spark driver. Invariants: what was decided is published once, whoever publishes it, and however often; batch N + 1 is
begun only when N is published. Crash: at any place; see `spark_bridge.sink_publish` for what is found afterwards. (Iceberg's and Delta's streaming sinks skip a
batch by the number that their table's last commit carries; here a log of decisions stands in for the table's.)
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

from spark_bridge.sink_log import EPOCH_MAX, UNKNOWN_ROWS, DecisionLog, Manifest, Stage, State, Target, known, taken_over
from spark_bridge.sink_publish import UNFINISHED_ADVICE, OtherTopicError, StagedRowsGoneError, progress, publish, question, target_info
from spark_bridge.sink_source import CLIENT_ID, Sources
from spark_bridge.sink_stage import Staged, combined
from spark_bridge.sink_wire import BatchSender, UndecidedError
from tailrace.admin import Admin
from tailrace.errors import InvalidRequestError, SchemaMismatchError, TailraceError, error_for
from tailrace.offset_lookup import ready_offsets
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition
from tailrace.topics import TopicInfo

logger = logging.getLogger("tailrace.spark")
CRASH_VARIABLE = "TAILRACE_SINK_CRASH"
"""Of tests: `point` or `point:batch`, a place where the driver is killed: after_staging, after_manifest, in_publish, before_done, after_done."""
ATTEMPTS = 50
PAUSE_S = 0.1
TIDY_BATCHES = 16
TIDY_ROWS = 200_000
"""Staged rows are deleted after so many batches, or a batch of so many rows."""


DIFFERS = (
    "nothing of it is written; where the query's source does not give the same rows again, or its checkpoint is a copy, rows may be missing"
)


class Fenced(InvalidRequestError):
    """Another run of the same query has taken over."""


def crash_point(name: str, batch_id: int) -> None:
    """Kill the driver, if the test that runs it wants that here."""
    if is_armed(name, batch_id):
        for process in _ancestors_of_java() or [os.getpid()]:
            os.kill(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def is_armed(name: str, batch_id: int) -> bool:
    """Whether the driver is to be killed at this place."""
    return os.environ.get(CRASH_VARIABLE, "") in (name, f"{name}:{batch_id}")


def _ancestors_of_java() -> list[int]:
    """The Java process that this one belongs to, if any."""
    process = os.getpid()
    while process > 1:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return [process]
        process = int(rest.split()[1])
    return []


class Committer:
    """Commits batches of one sink. Of a process; `close` it."""

    def __init__(self, bootstrap: str, timeout_ms: int) -> None:
        self.admin = Admin(bootstrap, client_id=CLIENT_ID, connect_timeout_ms=timeout_ms)
        self.sources = Sources(self.admin, timeout_ms)
        self._bootstrap = bootstrap
        self._timeout_ms = timeout_ms
        self._senders = [BatchSender(bootstrap, CLIENT_ID, timeout_ms)]
        self._doubted = -1
        """The number of the target whose partition could not tell whether it has a batch."""

    @property
    def log_sender(self) -> BatchSender:
        """For the log of decisions."""
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
                    f"another run of this query has taken over at batch {state.published + 1}; this one may write nothing any more: stop it, "
                    "and give each query a checkpoint of its own"
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
                    logger.warning("sink_batch_differs batch=%d rows=%d published_rows=%d: %s", batch_id, rows, state.rows, DIFFERS)
                return False
            if not rows:
                return True  # nothing to remember: its repetition has no rows either
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
        raise error_for(ErrorCode.NOT_READY, f"batch {batch_id} was disturbed {ATTEMPTS} times by other drivers of the same query")

    # ---- deciding ----------------------------------------------------------------------------------------------------------------------------

    def _decided(self, state: State, run: str, batch_id: int, staged: list[Staged]) -> State:
        targets, stages = combined(staged)
        infos = known(self.admin, list(dict.fromkeys(topic for topic, _, _, _ in targets)))
        if any(version and topic in infos and infos[topic].slot_map_version != version for topic, _, _, version in targets):
            raise error_for(ErrorCode.STALE_SLOT_MAP, "partitions were added to a topic while the batch was staged: it has to be repeated")
        rows = [0] * len(targets)
        for batches in stages.values():
            for _, count, target in batches:
                rows[target] += count
        ends = self._bounds([(topic, topic_id, partition) for topic, topic_id, partition, _ in targets])
        producer_id, epoch = self._identity(state)
        manifest = Manifest(
            batch_id, producer_id, epoch,
            tuple(Target(*target, ends[number][1] if number in ends else 0, rows[number]) for number, target in enumerate(targets)),
            tuple(Stage(*key, tuple(batches)) for key, batches in stages.items()),
        )  # fmt: skip
        return replace(state, run=run, producer_id=producer_id, epoch=epoch, manifest=manifest)

    def _identity(self, state: State) -> tuple[int, int]:
        """A producer and an epoch that no manifest has had. The sink's producer is nobody else's, so its epochs can be counted in its log."""
        if state.producer_id >= 0 and state.epoch < EPOCH_MAX:
            return state.producer_id, state.epoch + 1
        answer = self.log_sender.call_json(Api.INIT_PRODUCER_ID, {})
        return int(answer["producer_id"]), int(answer["producer_epoch"])

    def _bounds(self, targets: list[tuple[str, str, int]]) -> dict[int, tuple[int, int]]:
        """Number -> (beginning, end) of the partition's log; not of one whose topic is gone."""
        infos = known(self.admin, list(dict.fromkeys(topic for topic, _, _ in targets)))
        keys = {
            number: TopicPartition(topic, partition)
            for number, (topic, topic_id, partition) in enumerate(targets)
            if topic in infos and infos[topic].topic_id.hex() == topic_id
        }
        found = ready_offsets(self.admin.offsets, keys.values(), "latest", self._timeout_ms)
        return {number: (found[key]["beginning"], found[key]["end"]) for number, key in keys.items()}

    # ---- publishing --------------------------------------------------------------------------------------------------------------------------

    def _infos(self, manifest: Manifest) -> dict[str, TopicInfo]:
        return known(self.admin, list(dict.fromkeys([t.topic for t in manifest.targets] + [s.topic for s in manifest.stages])))

    def _progress(self, manifest: Manifest, infos: Mapping[str, TopicInfo]) -> dict[int, int]:
        bounds = self._bounds([target.key for target in manifest.targets])
        return progress(manifest, infos, bounds, self.sources.of)

    def _publish(self, log: DecisionLog, state: State, manifest: Manifest, present: Mapping[int, int]) -> None:
        """Send what is not there, then say so. Whoever is disturbed returns, and looks again."""
        sender = BatchSender(self._bootstrap, CLIENT_ID, self._timeout_ms)
        self._senders.append(sender)

        def at(place: str) -> None:
            if is_armed(place, manifest.batch_id):
                sender.drain()  # what was sent until now is to be there
                crash_point(place, manifest.batch_id)

        try:
            publish(manifest, self._infos(manifest), self.sources.of, sender, present, at)
        except UndecidedError as error:
            logger.warning("sink_undecided batch=%d reason=%r", manifest.batch_id, str(error))
            lane = (error.lane.topic.topic_id.hex(), error.lane.partition)
            self._doubted = next(n for n, target in enumerate(manifest.targets) if (target.topic_id, target.partition) == lane)
            time.sleep(PAUSE_S)  # another driver may be at it
            return
        finally:
            sender.close()
            self._senders.remove(sender)
        crash_point("before_done", manifest.batch_id)
        published = replace(state, published=manifest.batch_id, rows=sum(target.rows for target in manifest.targets), manifest=None)
        log.append(state, "done", published)

    def _finish(self, log: DecisionLog, state: State, manifest: Manifest) -> None:
        """One step towards the end of a publication that was begun before, perhaps by another driver, which may still be at it."""
        infos = self._infos(manifest)
        present = self._progress(manifest, infos)
        logger.info("sink_rolls_forward batch=%d present=%r", manifest.batch_id, present)
        try:
            self._publish(log, state, manifest, present)
        except (OtherTopicError, StagedRowsGoneError, SchemaMismatchError, TailraceError) as error:
            if not _cannot_be_finished(error):
                raise
            self._give_up(log, state, manifest, error)
            return
        seen, doubted = log.read(), self._doubted
        if seen.manifest == manifest and self._is_forgotten(manifest, infos):
            self._amend(log, seen, manifest, doubted)

    def _amend(self, log: DecisionLog, seen: State, manifest: Manifest, number: int) -> None:
        """A partition has forgotten the manifest's producer, so nothing more of it is appended there: the rest gets another epoch. All other partitions keep
        theirs: what has just been sent to them, and is not seen yet, they recognise by it.
        """
        present = self._progress(manifest, self._infos(manifest))[number]
        target = manifest.targets[number]
        identity = self._identity(seen)
        end = self._bounds([target.key])[0][1]
        amended = replace(target, skip=target.skip + present, start=end, identity=identity)
        targets = (*manifest.targets[:number], amended, *manifest.targets[number + 1 :])
        following = replace(seen, producer_id=identity[0], epoch=identity[1], manifest=replace(manifest, targets=targets))
        log.append(seen, "begin", following)

    def _is_forgotten(self, manifest: Manifest, infos: Mapping[str, TopicInfo]) -> bool:
        """Whether the partition that could not tell knows nothing of the manifest's producer; otherwise another driver is ahead, and its batches are to be
        waited for.
        """
        number, self._doubted = self._doubted, -1
        if number < 0:
            return False
        topic = target_info(manifest.targets[number], infos)
        asking = BatchSender(self._bootstrap, CLIENT_ID, self._timeout_ms, asks=True)
        try:
            asking.add(
                asking.lane(topic, manifest.targets[number].partition, manifest.targets[number].map_version),
                question(manifest, number, topic),
            )
            asking.drain()
        except UndecidedError as error:
            return error.code is ErrorCode.UNKNOWN_SEQUENCE
        finally:
            asking.close()
        raise error_for(ErrorCode.INTERNAL_ERROR, f"{topic.name} took a batch behind a gap")

    def _give_up(self, log: DecisionLog, state: State, manifest: Manifest, error: TailraceError) -> None:
        """A publication that nobody can finish: void, if nothing of it is in a log."""
        present = self._progress(manifest, self._infos(manifest))
        if any(present.values()) or any(target.skip for target in manifest.targets):
            done = ", ".join(f"{present[n] + t.skip} of {t.rows} rows in {t.topic}-{t.partition}" for n, t in enumerate(manifest.targets))
            raise type(error)(
                f"batch {manifest.batch_id} is published in part and cannot be finished ({error.detail}); there are {done}. {UNFINISHED_ADVICE}"
            ) from None
        logger.warning("sink_void batch=%d reason=%r", manifest.batch_id, error.detail)
        log.append(state, "void", replace(state, manifest=None))

    def _tidy(self, log: DecisionLog, manifest: Manifest) -> None:
        """Delete what was staged for a published batch, and before it: nothing older is needed by anyone. What fails is tried with the next batch."""
        ends = {TopicPartition(stage.topic, stage.partition): stage.batches[-1][0] + stage.batches[-1][1] for stage in manifest.stages}
        try:
            self.admin.delete_records(ends)
            log.trim()
        except TailraceError as error:
            logger.warning("sink_tidy_failed batch=%d reason=%r", manifest.batch_id, error.detail)


def _older(batch_id: int, published: int) -> str:
    return (
        f"batch {batch_id} is to be written, and batch {published} of this query was: its checkpoint is an older copy, another query uses it too, or "
        "another one has the same queryId; what this one reads is not what was written under its numbers. Start it with a checkpoint of its own, and a "
        "queryId of its own where it has that option"
    )


def _cannot_be_finished(error: TailraceError) -> bool:
    return isinstance(error, (OtherTopicError, StagedRowsGoneError, SchemaMismatchError)) or error.code in (
        ErrorCode.STALE_SLOT_MAP, ErrorCode.UNKNOWN_TOPIC, ErrorCode.PARTITION_OUT_OF_RANGE, ErrorCode.RECORD_TOO_LARGE,
    )  # fmt: skip
