"""A new session's first query, in a process of its own: see `bench.with_spark.spark`.

`python -P -m bench.with_spark.spark_first_query ADDRESS` prints the seconds from the session being
up to the count of `small`; `--prepare` makes what `spark_bridge.prepare` keeps.
"""

from __future__ import annotations

import sys
import time

import spark_bridge


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1] == "--prepare":
        spark_bridge.prepare()
        return
    with spark_bridge.session(master="local[2]") as spark:
        begun = time.perf_counter()
        reader = spark.read.format("tailrace").option("bootstrap", sys.argv[1])
        count = reader.option("subscribe", "small").load().count()
        print("seconds", time.perf_counter() - begun, count)


if __name__ == "__main__":
    main()
