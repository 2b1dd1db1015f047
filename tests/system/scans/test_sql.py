"""`tailrace sql`: topics are tables, answers are aligned or JSON, what is wrong is a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from appliance.cli.commands.records import sql
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    frame = pa.table({"carrier": ["aa", "bb"] * 500, "delay": pa.array(range(1_000), pa.float64())})
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address, batch_size=4096) as producer,
    ):
        admin.create_topics(
            [
                NewTopic("flights", schema=frame),
                NewTopic("orders", 2),
                NewTopic("my-topic"),
                NewTopic("a.b"),
            ]
        )
        producer.send_arrow("flights", frame)
        for n in range(1_000):
            producer.send("orders", b"v%d" % n, b"k%d" % n, partition=n % 2, timestamp=n)
        producer.send("my-topic", b"\xff1")
        producer.flush(60)
    return appliance


def lines(appliance: EmbeddedAppliance, query: str) -> list[list[str]]:
    return [line.split() for line in run(appliance, "sql", query).stdout.decode().splitlines()]


def rows(appliance: EmbeddedAppliance, query: str) -> Any:
    return json.loads(run(appliance, "sql", query, "--json").stdout)


def test_topics_are_tables_of_their_names(filled: EmbeddedAppliance) -> None:
    out = run(
        filled, "sql", "select carrier, avg(delay) from flights group by 1 order by 1"
    ).stdout.decode()
    assert out.splitlines() == ["carrier  avg(delay)", "aa            499.0", "bb            500.0"]
    assert lines(filled, "select count(*) as n from Orders") == [["n"], ["1000"]]
    assert lines(filled, 'select value from "my-topic"') == [["value"], ["\\xff1"]]
    joined = (
        'select decode(value) as v from orders o join flights f on o."offset" = f.delay '
        "where o.partition = 1 and f.delay in (3, 5) order by 1"
    )
    assert lines(filled, joined) == [["v"], ["v11"], ["v7"]]
    twice = (
        "select count(*) as n from orders x join orders y on x.partition = y.partition and "
        'x."offset" = y."offset"'
    )
    assert lines(filled, twice) == [["n"], ["1000"]]


def test_json_is_one_document_also_of_no_rows_and_of_many(filled: EmbeddedAppliance) -> None:
    assert rows(filled, "select carrier, sum(delay::hugeint) s, null x, max(delay) m from flights "
                        "group by 1 order by 1") == [
        {"carrier": "aa", "s": 249_500, "x": None, "m": 998.0},
        {"carrier": "bb", "s": 250_000, "x": None, "m": 999.0},
    ]  # fmt: skip
    assert rows(filled, "select * from orders where partition = 7") == []
    assert [row["n"] for row in rows(filled, "select range as n from range(10000)")] == list(
        range(10_000)
    )


def test_a_time_that_python_has_not_is_text_and_its_rows_are_there(
    filled: EmbeddedAppliance, topic: str
) -> None:
    """As producers give it that take microseconds for milliseconds."""
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic)])
        for time_ms in (0, 1_700_000_000_000_000):
            producer.send(topic, b"x", timestamp=time_ms)
        producer.flush(60)
    columns = f"select timestamp, timestamp - interval '1975 years' as early from \"{topic}\""
    found = lines(filled, columns)
    assert [line[0] for line in found[1:]] == ["1970-01-01", "55840-11-08"]
    first, second = rows(filled, columns)
    assert second["timestamp"] == "55840-11-08 22:13:20+00:00"
    assert first["early"] == "-0005-01-01 00:00:00+00:00"


def test_json_leaves_no_column_out_whatever_their_names_and_numbers(
    filled: EmbeddedAppliance,
) -> None:
    assert rows(filled, "select 1 as a, 2 as a, 3 as a_1, 4 as a") == [
        {"a": 1, "a_2": 2, "a_1": 3, "a_3": 4}
    ]


def test_numbers_are_written_with_all_their_digits(filled: EmbeddedAppliance) -> None:
    """Decimals and sums beyond 64 bits went through a float, and what Arrow has no type for became
    something else.
    """
    query = (
        "select 12345678901234567890.123456789012345678::decimal(38, 18) as d, "
        "sum(9223372036854775807::bigint) as s, [0.10::decimal(5, 2)] as l, "
        "170141183460469231731687303715884105727::hugeint as h, "
        "340282366920938463463374607431768211455::uhugeint as u, '101'::bit as b, "
        "interval 1 month as i, 1 as i from range(3)"
    )
    answer = run(filled, "sql", query, "--json").stdout.decode()
    assert json.loads(answer, parse_float=str) == [
        {
            "d": "12345678901234567890.123456789012345678", "s": 27670116110564327421,
            "l": ["0.10"], "h": 2**127 - 1, "u": str(2**128 - 1), "b": "101",
            "i": "1 month", "i_1": 1,
        }
    ]  # fmt: skip
    assert str(2**128 - 1) in run(filled, "sql", query).stdout.decode()


@pytest.mark.parametrize(
    "name",
    [
        "pg_class",
        "duckdb_tables",
        "sqlite_master",
        "tables",
        "topics",
        "query",
        "range",
        "select",
        "data.csv",
        "a.b",
    ],
)
def test_a_topic_is_a_table_whatever_its_name_means_to_duckdb(
    filled: EmbeddedAppliance, name: str
) -> None:
    """pg_class gave DuckDB's own view, with status 0; `topics` and `query` are variables of this
    program.
    """
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        if name not in admin.list_topics():
            admin.create_topics(NewTopic(name))
        producer.send(name, b"mine").result(60)
    assert {row["v"] for row in rows(filled, f'select decode(value) as v from "{name}"')} == {
        "mine"
    }
    assert (
        rows(filled, f'select count(*) as n from "{name}" x join "{name}" y using ("offset")')[0][
            "n"
        ]
        >= 1
    )


@pytest.mark.parametrize(
    ("query", "count"),
    [("select count(*) n from orders join orders o using (partition, \"offset\")", 1_000),
     ("select count(*) n from orders natural join (select partition, \"offset\" from Orders) o",
     1_000),
     (("select count(*) n from flights join (select carrier, 1 as one from flights where delay = "
      "0) t using (carrier)"), 500),
     ("select count(*) n from (pivot flights on carrier using count(*))", 1_000),
     ("select count(*) n from flights /* it's */ natural join (select 1.0 as delay) -- 'natural",
     1),
     ("with orders as (select 1 as x) select count(*) n from orders natural join orders o", 1)],
)  # fmt: skip
def test_tables_that_cannot_be_bound_without_their_columns_are_found(
    filled: EmbeddedAppliance, query: str, count: int
) -> None:
    """`join ... using` was refused: column does not exist on left side of join."""
    assert rows(filled, query) == [{"n": count}]


def test_columns_that_differ_by_case_alone_are_not_taken_for_each_other(
    filled: EmbeddedAppliance, topic: str
) -> None:
    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics(
            NewTopic(
                topic,
                schema=pa.schema([("a", pa.int64()), ("A", pa.int64()), ("_Offset", pa.int64())]),
            )
        )
        producer.send(topic, {"a": 1, "A": 2, "_Offset": 7}).result(60)
    assert rows(filled, f'select * from "{topic}"') == [{"a": 1, "A_1": 2, "_Offset": 7}]
    assert rows(filled, f'select a, _offset from "{topic}"') == [{"a": 1, "_Offset": 7}]
    said = run(filled, "sql", f'select A from "{topic}"', status=1).stderr.decode()
    assert f"columns 'a' and 'A' of topic {topic!r} are one column to SQL" in said


def test_a_word_in_a_text_or_a_comment_adds_no_column(filled: EmbeddedAppliance) -> None:
    for query in (
        "select * from orders where decode(key) = 'topic'",
        "select * from orders limit 1 -- _offset",
        "select * from orders where 'a' = $$topic$$",
    ):
        first = run(filled, "sql", query).stdout.decode().splitlines()[0]
        assert first.split() == list(sql.RECORD_COLUMNS)


def test_two_topics_that_are_one_table_to_sql_are_not_taken_for_each_other(
    filled: EmbeddedAppliance,
) -> None:
    with Admin(filled.address) as admin:
        admin.create_topics([NewTopic("Pair"), NewTopic("pair")])
    with Producer(filled.address) as producer:
        producer.send("pair", b"x").result(60)
    assert lines(filled, "select count(*) from Pair") == [["count_star()"], ["0"]]
    answer = run(
        filled,
        "sql",
        'select (select count(*) from "Pair") a, (select count(*) from "pair") b',
        status=1,
    )
    assert answer.stdout == b""
    assert b"topics 'Pair' and 'pair' are one table to SQL, which ignores case" in answer.stderr


def test_the_logs_columns_are_there_when_they_are_named(filled: EmbeddedAppliance) -> None:
    assert list(rows(filled, "select * from flights limit 1")[0]) == ["carrier", "delay"]
    assert rows(filled, "select max(_offset) m, any_value(_topic) t from flights") == [
        {"m": 999, "t": "flights"}
    ]
    assert list(rows(filled, "select * from orders limit 1")[0]) == list(sql.RECORD_COLUMNS)
    assert rows(filled, "select timestampType, topic from orders limit 1") == [
        {"timestampType": 0, "topic": "orders"}
    ]


def test_a_filter_sees_the_columns_that_it_names(filled: EmbeddedAppliance) -> None:
    assert rows(
        filled, "select decode(key) k from orders where timestamp = make_timestamptz(7000)"
    ) == [{"k": "k7"}]
    assert rows(
        filled, "select count(*) n from orders where key is null or value = 'v5'::blob"
    ) == [{"n": 1}]


def test_an_answer_can_go_into_a_file(filled: EmbeddedAppliance, tmp_path: Any) -> None:
    run(filled, "sql", f"copy (select * from flights) to '{tmp_path}/f.parquet'")
    assert pyarrow.parquet.read_table(tmp_path / "f.parquet").num_rows == 1_000


@pytest.mark.parametrize(
    ("query", "sentence"),
    [("select 1 from order_s", "there is no topic 'order_s'; did you mean orders?"),
    ("select * from my-topic", 'Write "my-topic" in double quotes'),
     ("select * from a.b", 'write "a.b" in double quotes'),
     ("selec 1", 'syntax error at or near "selec"'),
     ("select nocol from orders", '"nocol" not found'),
     ("select * from orders order by offset", 'write "offset" in double quotes, or _offset'),
     ("select 1; select 2", "single statement")],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(
    filled: EmbeddedAppliance, query: str, sentence: str
) -> None:
    said = run(filled, "sql", query, status=1).stderr.decode()
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_without_duckdb_it_says_how_to_install_it(filled: EmbeddedAppliance, tmp_path: Any) -> None:
    (tmp_path / "duckdb.py").write_text("raise ModuleNotFoundError('no duckdb')")
    done = subprocess.run(
        [sys.executable, "-c", "from appliance.cli.main import main; main()", "sql", "select 1",
        "--bootstrap", filled.address],
        capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    )  # fmt: skip
    assert (done.returncode, "pip install 'tailrace[sql]'" in done.stderr) == (1, True)


def test_damage_is_said_as_a_consumer_says_it(filled: EmbeddedAppliance, topic: str) -> None:
    import pathlib

    with Admin(filled.address) as admin, Producer(filled.address) as producer:
        admin.create_topics([NewTopic(topic)])
        for n in range(4):
            producer.send(topic, b"%d" % n).result(60)
    (segment,) = pathlib.Path(filled.data_dir, f"{topic}-0").glob("*.arrows")
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    assert (
        f"{topic}-0: offsets 3 to 3 are damaged"
        in run(filled, "sql", f'select value from "{topic}"', status=1).stderr.decode()
    )


@pytest.mark.parametrize("is_read_on", [True, False])
def test_rows_come_while_the_query_runs_and_ctrl_c_ends_it(
    filled: EmbeddedAppliance, is_read_on: bool
) -> None:
    query = "select range as n, carrier from range(1000000000000), flights"
    command = [
        sys.executable,
        "-P",
        "-c",
        "from appliance.cli.main import main; main()",
        "sql",
        query,
        "--bootstrap",
        filled.address,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline().split() == [b"n", b"carrier"]
        running.send_signal(signal.SIGINT)
        if is_read_on:
            running.communicate(timeout=HANG_LIMIT_S)
        assert running.wait(HANG_LIMIT_S) == 130


def test_columns_that_duckdb_cannot_read_are_left_out_and_named(
    appliance: EmbeddedAppliance,
) -> None:
    halves = pa.list_(pa.float16())
    schema = pa.schema([("n", pa.int64()), ("wide", pa.decimal256(50, 2)), ("embedding", halves)])
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("embedded", schema=schema)])
        producer.send_arrow("embedded", pa.table({"n": [7], "wide": [None], "embedding": [None]}))
        producer.flush(60)
    found = run(appliance, "sql", "select * from embedded", "--json")
    assert json.loads(found.stdout) == [{"n": 7}]
    assert "wide (decimal256(50, 2)), embedding (list<item: halffloat>)" in found.stderr.decode()
    named = run(appliance, "sql", "select wide from embedded", status=1)
    assert "left out: wide" in named.stderr.decode()
