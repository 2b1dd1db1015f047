"""`tailrace sql`: topics are tables of DuckDB, read by the one reader of the log (`tailrace.scanning`), with only the columns that a query needs.

The query runs in a thread of its own: DuckDB looks for Ctrl-C seldom, and is told of it here.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click

from appliance.cli.main import EXIT_INTERRUPTED
from appliance.cli.options import bootstrap_option, connect, json_option
from appliance.cli.sql_output import write_json, write_table
from tailrace.errors import TailraceError, UnknownTopicError
from tailrace.topics import TopicInfo

ROWS_AT_ONCE = 2_048
STOP_WAIT_S = 2.0
INSTALL = "`tailrace sql` needs DuckDB: pip install 'tailrace[sql]'"
RECORD_COLUMNS = ("partition", "offset", "timestamp", "key", "value", "headers")
"""Of a topic without a schema. What lies in headers comes first: `count(*)` asks for the first column."""
ON_REQUEST = ("topic", "timestampType", "_topic", "_partition", "_offset", "_timestamp")
_MISSING_TABLE = re.compile(r"Table with name (.+?) does not exist")


@click.command()
@click.argument("query")
@json_option
@bootstrap_option
def command(query: str, as_json: bool, bootstrap: str) -> None:
    """Query topics with DuckDB's SQL: each topic is a table of its name, with what is settled in it now.

    A typed topic has its own columns; others have partition, offset, timestamp, key, value and headers, where decode(value) is a value's text. A query that
    names _topic, _partition, _offset or _timestamp has these too. Names that are no plain identifiers stand in double quotes.

    \b
    Example:
      tailrace sql 'select carrier, avg(delay) from flights group by 1'
      tailrace sql 'select count(*) from "my-topic" where timestamp > now() - interval 1 hour'
      tailrace sql "copy (select * from flights) to 'flights.parquet'"
    """
    try:
        import duckdb
        import pytz as pytz  # duckdb's times with a zone need it
    except ModuleNotFoundError:
        raise click.ClickException(INSTALL) from None
    with duckdb.connect() as database:
        tables: dict[str, Any] = {}
        try:
            _run_in_thread(lambda: _answer(database, duckdb, tables, query, bootstrap, as_json), database.interrupt)
        except duckdb.Error as error:
            failed = next((table.error for table in tables.values() if table.error is not None), None)
            if failed is not None:
                raise failed from None
            raise click.ClickException(_sentence(error)) from None
        finally:
            for table in tables.values():
                table.close()


def _answer(database: Any, duckdb: Any, tables: dict[str, Any], query: str, bootstrap: str, as_json: bool) -> None:
    with connect(bootstrap) as admin:
        topics = admin.list_topics()
        try:
            named, qualified = (set(database.get_table_names(query, qualified=full)) for full in (False, True))
        except duckdb.ParserException as error:
            raise click.ClickException(_sentence(error) + _quoting_hint(error, query, topics)) from None
        called: dict[str, str] = {}
        for name in sorted(named):
            topic = _topic_called(name, topics)
            if topic is None and (dotted := [q for q in qualified if q.endswith(f".{name}") and q in topics]):
                raise click.ClickException(f'topic {dotted[0]!r} is a name with a dot: write "{dotted[0]}" in double quotes')
            if topic is not None:
                other = called.setdefault(name.lower(), topic)
                if other != topic:
                    raise click.ClickException(f"topics {other!r} and {topic!r} are one table to SQL: ask each in a query of its own")
                tables[name] = _table(admin.topic_info([topic])[topic], query, bootstrap)
                database.register(name, tables[name])
    try:
        result = database.sql(query)
    except duckdb.CatalogException as error:
        raise _unknown_table(error, topics) from None
    if result is not None:
        reader = result.to_arrow_reader(ROWS_AT_ONCE) if hasattr(result, "to_arrow_reader") else result.fetch_arrow_reader(ROWS_AT_ONCE)
        (write_json if as_json else write_table)(list(result.columns), _rows(reader))
    sys.stdout.flush()


def _rows(reader: Any) -> Iterator[list[list[Any]]]:
    """Rows in pieces."""
    from appliance.cli.sql_values import python_values

    for batch in reader:
        columns = [python_values(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
        yield [list(row) for row in zip(*columns, strict=True)]


def _topic_called(name: str, topics: list[str]) -> str | None:
    """As SQL compares names: by their case only where two differ in nothing else. None: it may be something else's."""
    if name in topics:
        return name
    alike = [topic for topic in topics if topic.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def _table(info: TopicInfo, query: str, bootstrap: str) -> Any:
    from tailrace.scanning.columns import LOG_COLUMNS
    from tailrace.scanning.dataset import topic_dataset

    own = info.schema.names if info.typed else list(RECORD_COLUMNS)
    log = {column.name for column in LOG_COLUMNS}
    extra = [n for n in ON_REQUEST if n not in own and (n in log or not info.typed) and re.search(rf"\b{n}\b", query, re.IGNORECASE)]
    return topic_dataset(info.name, bootstrap, [*own, *extra], client_id="tailrace-sql")


def _run_in_thread(work: Callable[[], None], interrupt: Callable[[], None]) -> None:
    """Run `work`; raise what it raises. Ctrl-C interrupts it."""
    raised: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            is_done.set()

    threading.Thread(target=run, name="sql", daemon=True).start()
    try:
        is_done.wait()
    except KeyboardInterrupt:
        interrupt()
        if not is_done.wait(STOP_WAIT_S):
            os._exit(EXIT_INTERRUPTED)  # it writes to something that takes nothing any more, and would keep Python from ending
        raise
    if raised:
        raise raised[0]


def _sentence(error: Exception) -> str:
    """DuckDB's error without the picture of the query."""
    text = re.split(r"\n\s*LINE \d+:", str(error))[0]
    return " ".join(text.split())


def _unknown_table(error: Exception, topics: list[str]) -> Exception:
    found = _MISSING_TABLE.search(str(error))
    if found is None:
        return click.ClickException(_sentence(error))
    name = found[1].strip('"')
    near = difflib.get_close_matches(name, topics, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(topics[:10])}" if topics else "there is none yet"
    refusal: TailraceError = UnknownTopicError(f"there is no topic {name!r}; {hint}")
    return refusal


def _quoting_hint(error: Exception, query: str, topics: list[str]) -> str:
    """For a topic whose name is no identifier of SQL, and stands in the query without quotes."""
    odd = [topic for topic in topics if not re.fullmatch(r"[A-Za-z_]\w*", topic) and topic in query and f'"{topic}"' not in query]
    if not odd and re.search(r"near \"offset\"", str(error)):
        return '. OFFSET is a word of SQL: write "offset" in double quotes, or _offset'
    return f'. Write "{odd[0]}" in double quotes' if odd else ""
