"""From the options of a write to its writer: what can be wrong is said in the driver, before a task starts.

Owner: Spark, which asks in the driver's planning, and again in the process that commits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_bridge.sink import BatchSink, StreamSink, refuse_overwrite
from spark_bridge.sink_options import SinkOptions, parse_sink_options
from spark_bridge.sink_rows import check_columns
from spark_bridge.sink_source import CLIENT_ID
from spark_bridge.sink_stage import CONNECT_TIMEOUT_MS
from tailrace.admin import Admin
from tailrace.errors import NotReachableError


def batch_sink(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """For `df.write`. Raises TailraceError."""
    refuse_overwrite(overwrite)
    options = parse_sink_options(given)
    _check(options, schema)
    return BatchSink(options)


def stream_sink(given: Mapping[str, str], schema: StructType) -> DataSourceStreamWriter:
    """For `df.writeStream`; with the output mode "complete" each batch appends all rows, as with Kafka's sink. Raises TailraceError. An appliance that is
    away is left to the tasks and the commit, which wait for it.
    """
    options = parse_sink_options(given)
    try:
        _check(options, schema)
    except NotReachableError:
        pass
    return StreamSink(options)


def _check(options: SinkOptions, schema: StructType) -> None:
    # A Spark that asks for a zone takes UTC: only the types are looked at.
    zone = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    columns = to_arrow_schema(schema, **zone)
    if options.topic is None:
        check_columns(columns, None, options.key_column)
        return
    with Admin(options.bootstrap, client_id=CLIENT_ID, connect_timeout_ms=CONNECT_TIMEOUT_MS) as admin:
        check_columns(columns, admin.topic_info(options.topic)[options.topic], options.key_column)
