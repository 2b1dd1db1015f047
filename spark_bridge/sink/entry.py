"""Entry points of writes: check the options of a write and make its writer, so that errors come in
the driver before a task starts.

Owner: Spark, which calls them while it plans, and again in the process that commits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

from spark_bridge.sink.options import CLIENT_ID, SinkOptions, parse_sink_options
from spark_bridge.sink.writer import BatchSink, StreamSink, refuse_overwrite

CONNECT_TIMEOUT_MS = 10_000
"""Time to connect in the driver, before a task starts. Tasks wait for publishTimeoutMs, for the
appliance may be restarting.
"""


def batch_sink(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """Make the writer of `df.write`.

    Raises: TailraceError.
    """
    refuse_overwrite(overwrite)
    options = parse_sink_options(given)
    _check(options, schema)
    return BatchSink(options)


def stream_sink(given: Mapping[str, str]) -> DataSourceStreamWriter:
    """Make the writer of `df.writeStream`.

    With the output mode "complete" each batch appends all rows, as with Kafka's sink. Spark makes
    the writer twice for each micro-batch, so the appliance is not asked here: the first task names
    a column that does not fit, before it writes a row.

    Raises: InvalidSettingError.
    """
    return StreamSink(parse_sink_options(given))


def _check(options: SinkOptions, schema: StructType) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    from spark_bridge.sink.rows import check_columns
    from tailrace.admin.admin import Admin

    # A Spark that asks for a zone takes UTC: only the types are looked at.
    zone = (
        {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    )
    columns = to_arrow_schema(schema, **zone)
    if options.topic is None:
        check_columns(columns, None, options.key_column)
        return
    with Admin(
        options.bootstrap, client_id=CLIENT_ID, connect_timeout_ms=CONNECT_TIMEOUT_MS
    ) as admin:
        check_columns(columns, admin.topic_info(options.topic)[options.topic], options.key_column)
