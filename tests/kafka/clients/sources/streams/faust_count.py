"""Faust: counts records by what they are grouped by, in a table with a changelog, through a topic
that divides them anew. Prints the table when all records are counted.

The gateway and the directory for its files are in the environment.
"""

from __future__ import annotations

import os
from typing import Any

import faust

RECORDS = 100

app = faust.App(
    "faust-count", broker=f"kafka://{os.environ['GATEWAY']}", store="memory://",
    topic_partitions=4, web_enabled=False, datadir=os.environ["FAUST_DATA"],
)  # fmt: skip
source = app.topic("faust-in", value_type=int)
counts = app.Table("counts", default=int, partitions=4)


async def count(numbers: Any) -> None:
    async for number in numbers.group_by(lambda number: str(number % 5), name="rest"):
        counts[number % 5] += 1
        if sum(counts.values()) == RECORDS:
            os.write(1, f"COUNTS {sorted(counts.items())}\n".encode())  # Faust replaces stdout


async def feed() -> None:
    for number in range(RECORDS):
        await source.send(value=number)


app.agent(source)(count)
app.task(feed)
app.main()
