"""Spark's Kafka connector for `make bench-spark`: a broker of its own, and a session of its own for
the connector's jars.

The session lives in a process of its own, so that its turns come between those of the others and
nobody else's JVM holds its classes, threads and caches. The topic is written by the connector, too,
from the same Parquet files: no client of Kafka for Python is needed.

Protocol: the process prints a JSON line when its topic is filled, and one for each line that it is
given ("WORK CONTENDER"); it ends with its input.
"""

from __future__ import annotations

import glob
import json
import os
import select
import subprocess
import sys
from typing import Any, Final

from bench.peers.kafka import SPARK_CONNECTOR, Kafka, fetch_jars
from bench.peers.servers import Missing
from bench.with_spark.spark_goals import AGGREGATE, KAFKA, KAFKA_LARGE, NOOP
from bench.with_spark.spark_work import Took, aggregate, jvm, noop, timed

TOPIC = "rows"
LINE_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
WORK: Final = {NOOP: noop, AGGREGATE: aggregate}
READ_OPTIONS: Final[dict[str, dict[str, str]]] = {
    KAFKA: {},
    KAFKA_LARGE: {
        "kafka.max.poll.records": "10000",
        "kafka.max.partition.fetch.bytes": str(8 << 20),
    },
}
WRITE_OPTIONS = {
    "topic": TOPIC,
    "kafka.acks": "1",
    "kafka.batch.size": "262144",
    "kafka.linger.ms": "5",
    "kafka.buffer.memory": "67108864",
}
"""Batches as bench-peers has them."""


class Connector:
    """A broker with the rows of the Parquet files in `parquet` (key, value, partition), and a
    session that reads them.
    """

    def __init__(self, directory: str, parquet: str, rows: int, partitions: int) -> None:
        """Raises Missing with a sentence when it cannot be had."""
        jars = ",".join(sorted(glob.glob(f"{fetch_jars(*SPARK_CONNECTOR)}/*.jar")))
        try:
            self._kafka = Kafka(directory)
        except subprocess.SubprocessError as error:
            raise Missing(f"Kafka's directory could not be made: {error}") from error
        try:
            self._kafka.java_topic(TOPIC, partitions)
            command = [
                sys.executable,
                "-P",
                "-m",
                "bench.with_spark.spark_kafka",
                self._kafka.bootstrap,
                str(self._kafka.server.pid),
                jars,
                parquet,
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._kafka.stop()
            raise Missing(f"Kafka's topic could not be made: {error}") from error
        try:
            found = self._line()
            if found != [rows]:
                raise Missing(f"its topic has {found} rows of {rows}")
        except BaseException:
            self.stop()
            raise

    def run(self, work: str, contender: str) -> Took:
        """One run. Raises Missing when the session is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps([work, contender])}\n".encode())
        except BrokenPipeError:
            raise Missing("its session has ended") from None
        return Took(*self._line())

    def _line(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LINE_TIMEOUT_S)[0]:
            raise Missing(f"its session said nothing for {LINE_TIMEOUT_S:g} s")
        line = self._process.stdout.readline()
        try:
            return json.loads(line)
        except ValueError:
            raise Missing(
                "its session has ended or said something else: "
                f"{line.decode(errors='replace')!r:.200}"
            ) from None

    def stop(self) -> None:
        """End the session, then the broker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._kafka.stop()


def serve(bootstrap: str, broker: int, jars: str, parquet: str) -> None:
    """In the process of its own: fill the topic, then do what the lines of the input say."""
    import spark_bridge

    def say(found: Any) -> None:
        print(json.dumps(found), flush=True)

    with spark_bridge.session(master="local[2]", config={"spark.jars": jars}) as spark:

        def topic(options: dict[str, str]) -> Any:
            return (
                spark.read.format("kafka")
                .options(**{"kafka.bootstrap.servers": bootstrap, "subscribe": TOPIC, **options})
                .load()
            )

        written = (
            spark.read.parquet(parquet).select("key", "value", "partition").write.format("kafka")
        )
        written.options(**{"kafka.bootstrap.servers": bootstrap, **WRITE_OPTIONS}).save()
        say([topic({}).count()])
        roots = [jvm(spark), broker]
        for line in sys.stdin:
            work, contender = json.loads(line)
            say(timed(lambda: WORK[work](topic(READ_OPTIONS[contender])), roots))  # noqa: B023


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    sys.exit(os.EX_OK)
