"""`tailrace sql`: queries topics as tables of DuckDB, through `tailrace.scanning`, with only the
columns that a query needs.

The query runs in its own thread, which the main thread interrupts on Ctrl-C: DuckDB itself checks
for signals rarely.
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
from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.sql.latest import MACRO, latest_tables, missing_topic
from appliance.cli.sql.names import dotted_words_of, tables_named, topic_called, words_of
from appliance.cli.sql.output import write_json, write_table
from appliance.cli.sql.values import as_readable, unknown_types
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import TailraceError, UnknownTopicError

ROWS_AT_ONCE = 2_048
STOP_WAIT_S = 2.0
INSTALL = "`tailrace sql` needs DuckDB: pip install 'tailrace[sql]'"
RECORD_COLUMNS = ("partition", "offset", "timestamp", "key", "value", "headers")
"""Columns of a topic without a schema. Those that batch headers hold come first, for `count(*)`
reads the first column.
"""
ON_REQUEST = ("topic", "timestampType", "_topic", "_partition", "_offset", "_timestamp")
_MISSING_TABLE = re.compile(r"Table with name (.+?) does not exist")


@click.command()
@click.argument("query")
@click.option("--limit", type=click.IntRange(min=1), help="End after this many rows.")
@click.option("--memory", metavar="SIZE", help="Memory of the query at most, such as 512MiB.")
@click.option(
    "--topics-only",
    is_flag=True,
    help="Read topics alone: no file, no address, no extension, and write nothing.",
)
@json_option
@bootstrap_option
def command(
    query: str,
    limit: int | None,
    memory: str | None,
    topics_only: bool,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Query topics with DuckDB's SQL. Each topic is a table of its name, with the records that are
    settled now.

    A typed topic has its own columns. Other topics have partition, offset, timestamp, key, value
    and headers; decode(value) is a value's text. A query that names _topic, _partition, _offset or
    _timestamp gets these columns too. Put names that are not plain identifiers in double quotes.
    latest('users') is the table of each key's latest record, without deleted keys; of a typed topic
    latest('flights', key_column := 'tail').

    \b
    Example:
      tailrace sql 'select carrier, avg(delay) from flights group by 1'
      tailrace sql 'select count(*) from "my-topic" where timestamp > now() - interval 1 hour'
      tailrace sql "select decode(key), decode(value) from latest('users')"
      tailrace sql "copy (select * from flights) to 'flights.parquet'"
    """
    try:
        import duckdb
        import pytz as pytz  # DuckDB needs it for times with a zone
    except ModuleNotFoundError:
        raise click.ClickException(INSTALL) from None
    with duckdb.connect() as database:
        tables: dict[str, Any] = {}
        try:
            _bound(database, memory, topics_only)
            _run_in_thread(
                lambda: _answer(
                    database, duckdb, tables, query, bootstrap, as_json, limit, topics_only
                ),
                database.interrupt,
            )
        except duckdb.Error as error:
            failed = next(
                (table.error for table in tables.values() if table.error is not None), None
            )
            if failed is not None:
                raise failed from None
            raise click.ClickException(_sentence(error)) from None
        finally:
            for table in tables.values():
                table.close()


def _bound(database: Any, memory: str | None, topics_only: bool) -> None:
    """Set what a query may use. Raises UsageError."""
    database.execute(
        "SET python_enable_replacements = false"
    )  # a name is never a variable of this program
    database.execute(MACRO)
    if memory is not None:
        try:
            database.execute("SET memory_limit = ?", [memory])
        except Exception as error:
            raise click.UsageError(f"--memory is {memory!r}: {_sentence(error)}") from None
    if topics_only:
        database.execute("SET temp_directory = ''")
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")


def _answer(
    database: Any,
    duckdb: Any,
    tables: dict[str, Any],
    query: str,
    bootstrap: str,
    as_json: bool,
    limit: int | None,
    topics_only: bool,
) -> None:
    with connect(bootstrap) as admin:
        topics = admin.list_topics()
        try:
            statements = database.extract_statements(query)
        except duckdb.ParserException as error:
            raise click.ClickException(
                _sentence(error) + _quoting_hint(error, query, topics)
            ) from None
        if len(statements) != 1:
            raise click.ClickException(f"a query is a single statement; this has {len(statements)}")
        if topics_only and statements[0].type not in (
            duckdb.StatementType.SELECT,
            duckdb.StatementType.EXPLAIN,
        ):
            raise click.ClickException("with --topics-only a query is a SELECT or an EXPLAIN")
        words = words_of(query)
        for name, topic in tables_named(database, duckdb, query, words, topics).items():
            tables[name] = _table(admin.topic_info([topic])[topic], words, bootstrap)
            database.register(name, tables[name])
        for latest in latest_tables(query).values():
            topic_or_none = topic_called(latest.topic, topics)
            if topic_or_none is not None:
                info = admin.topic_info([topic_or_none])[topic_or_none]
                tables[latest.name] = _table(
                    info, words, bootstrap, latest=True, key_column=latest.key_column
                )
                database.register(latest.name, tables[latest.name])
    try:
        result = database.sql(query)
    except (duckdb.CatalogException, duckdb.IOException) as error:
        _refuse_dotted(query, topics)
        raise _unknown_table(error, topics) from None
    if result is not None:
        columns = list(result.columns)
        result = as_readable(result if limit is None else result.limit(limit))
        reader = (
            result.to_arrow_reader(ROWS_AT_ONCE)
            if hasattr(result, "to_arrow_reader")
            else result.fetch_arrow_reader(ROWS_AT_ONCE)
        )
        (write_json if as_json else write_table)(columns, _rows(reader))
    sys.stdout.flush()


def _rows(reader: Any) -> Iterator[list[list[Any]]]:
    """Rows in pieces."""
    from appliance.cli.sql.values import python_values

    for batch in reader:
        columns = [
            python_values(name, column)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        yield [list(row) for row in zip(*columns, strict=True)]


def _table(info: TopicInfo, words: set[str], bootstrap: str, **settings: Any) -> Any:
    from tailrace.scanning.columns import LOG_COLUMNS
    from tailrace.scanning.dataset import topic_dataset

    own = _readable_columns(info) if info.typed else list(RECORD_COLUMNS)
    _refuse_hidden_columns(info.name, own, words)
    log, taken = {column.name for column in LOG_COLUMNS}, {name.lower() for name in own}
    named = {word.lower() for word in words}
    extra = [
        n
        for n in ON_REQUEST
        if n.lower() not in taken and (n in log or not info.typed) and n.lower() in named
    ]
    return topic_dataset(info.name, bootstrap, [*own, *extra], client_id="tailrace-sql", **settings)


def _readable_columns(info: TopicInfo) -> list[str]:
    """A typed topic's columns that DuckDB can read. The others are named on standard error. Raises
    ClickException if there is none.
    """
    unknown = unknown_types(info.schema)
    if not unknown:
        return list(info.schema.names)
    left_out = ", ".join(f"{name} ({kind})" for name, kind in unknown.items())
    sentence = (
        f"DuckDB has no type for columns of topic {info.name!r}, which are left out: {left_out}. "
        "`tailrace.scan` reads them"
    )
    if len(unknown) == len(info.schema.names):
        raise click.ClickException(sentence)
    click.echo(sentence, err=True)
    return [name for name in info.schema.names if name not in unknown]


def _refuse_hidden_columns(topic: str, columns: list[str], words: set[str]) -> None:
    """Raises ClickException where a query names a column that SQL takes for another one: `A` of a
    topic that has `a`, too, is `A_1` to DuckDB.
    """
    first: dict[str, str] = {}
    for name in columns:
        other = first.setdefault(name.lower(), name)
        if other != name and name in words:
            raise click.ClickException(
                f"columns {other!r} and {name!r} of topic {topic!r} are one column to SQL; "
                "`select *` has both, the later ones with a number behind"
            )


def _refuse_dotted(query: str, topics: list[str]) -> None:
    """Raises ClickException where a topic's name with a dot stands in the query without quotes."""
    for name in dotted_words_of(query):
        if name in topics:
            raise click.ClickException(
                f'topic {name!r} is a name with a dot: write "{name}" in double quotes'
            )


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
            # The query's thread is blocked writing its result, and would keep Python from ending.
            os._exit(EXIT_INTERRUPTED)
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
    if (sentence := missing_topic(name, topics)) is not None:
        return UnknownTopicError(sentence)
    near = difflib.get_close_matches(name, topics, 1, 0.5)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"there are {', '.join(topics[:10])}"
        if topics
        else "there are no topics yet"
    )
    refusal: TailraceError = UnknownTopicError(f"there is no topic {name!r}; {hint}")
    return refusal


def _quoting_hint(error: Exception, query: str, topics: list[str]) -> str:
    """A hint for a topic whose name needs double quotes and stands in the query without them."""
    odd = [
        topic
        for topic in topics
        if not re.fullmatch(r"[A-Za-z_]\w*", topic) and topic in query and f'"{topic}"' not in query
    ]
    if not odd and re.search(r"near \"offset\"", str(error)):
        return '. OFFSET is a word of SQL: write "offset" in double quotes, or _offset'
    return f'. Write "{odd[0]}" in double quotes' if odd else ""
