"""A consumer in a process of its own, which a fuzzed program kills: `python -P -m
tests.fuzz.program.victim KIND ADDRESS GROUP TOPIC COMMITS`.

It writes a line for what each poll has delivered, and one before and behind each commit. Then it
goes on, so that the kill finds it anywhere.
"""

from __future__ import annotations

import subprocess
import sys

from tailrace import Consumer, ShareConsumer
from tests.fuzz.program.model import Reader
from tests.fuzz.program.queue_model import QueueReader
from tests.fuzz.program.world import World
from tests.kit.processes import HANG_LIMIT_S

AT_ONCE = 2
PATIENCE_POLLS = 8
"""So many polls without a record, and the victim is killed though it has read too little."""


class Victim:
    """The program's side of a victim."""

    def __init__(self, run: World, kind: str, group: str, name: str) -> None:
        self._run = run
        self._kind = kind
        self._group = group
        self._name = name

    def live(self, count: int, commits: bool) -> None:
        """Let it read so many records, or as many as there are, and kill it."""
        command = [
            sys.executable, "-P", "-m", "tests.fuzz.program.victim", self._kind,
            self._run.address, self._run.name(self._group), self._run.name(self._name),
            str(int(commits)),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines: list[str] = []
            delivered = idle = 0
            for line in process.stdout:
                lines.append(line)
                delivered += line.startswith("D")
                idle += line.startswith("idle")
                if delivered >= count or idle >= PATIENCE_POLLS:
                    break
            process.kill()
            lines += process.stdout.readlines()
            process.wait(HANG_LIMIT_S)
        whole = [line.split() for line in lines if line.endswith("\n")]
        if self._kind == "ShareConsumer":
            self._follow_queue(whole)
        else:
            self._follow(whole)

    def _follow(self, lines: list[list[str]]) -> None:
        """Tell the model what the victim has done."""
        run = self._run
        reader = Reader("the victim", run.topics, run.offsets, self._group, True, True)
        reader.assigned((self._name, number) for number in range(run.partitions[self._name]))
        for word, *fields in lines:
            if word == "D":
                topic_id, partition, offset = bytes.fromhex(fields[0]), *map(int, fields[1:])
                reader.delivered([((self._name, partition), topic_id, offset)])
                # The next poll commits what this one has delivered.
                reader.asks()
            elif word in ("C", "c"):
                reader.commits(None, is_certain=word == "c")
        for committed in run.offsets.values():
            committed.ended(reader)

    def _follow_queue(self, lines: list[list[str]]) -> None:
        run = self._run
        reader = QueueReader("the victim", run.queue, is_implicit=True)
        for word, *fields in lines:
            if word == "D":
                topic_id = bytes.fromhex(fields[0])
                partition, offset, count = map(int, fields[1:])
                reader.delivered((topic_id, partition, offset), count, in_loop=False)
            elif word == "C":
                reader.commits(is_certain=False)
            elif word == "c":
                reader.commits(is_certain=True)
        reader.may_have_asked()
        reader.closed()
        run.queue.lost_sight()


def main(arguments: list[str]) -> None:
    """The victim."""
    kind, address, group, topic, commits = arguments
    consumer: Consumer | ShareConsumer
    if kind == "ShareConsumer":
        consumer = ShareConsumer(
            topic, bootstrap=address, group_id=group, auto_offset_reset="earliest"
        )
    else:
        consumer = Consumer(
            topic,
            bootstrap=address,
            group_id=group,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=0,
        )
    while True:
        records = consumer.poll(100, AT_ONCE)
        text = "idle\n"
        if records:
            text = "".join(
                f"D {record.topic_id.hex()} {record.partition} {record.offset}"
                f" {getattr(record, 'delivery_count', '')}\n"
                for record in records
            )
        sys.stdout.write(text)
        sys.stdout.flush()
        if records and commits == "1":
            print("C", flush=True)
            consumer.commit()
            print("c", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
