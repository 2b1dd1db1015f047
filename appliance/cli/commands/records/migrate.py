"""`tailrace migrate`: moves topics, records and groups from Kafka here, and back."""

from __future__ import annotations

import datetime as dt
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from appliance.cli.main import CONNECT_TIMEOUT_MS
from appliance.cli.options.default_command import DefaultGroup
from appliance.cli.options.shared import bootstrap_option, json_option
from appliance.cli.output import complain, counted, echo, human_bytes, print_json, print_table
from appliance.migrate.errors import InterruptedSessionError, MigrationError
from shm.crash_points import arm_from_environment
from tailrace.core.errors import NotReachableError
from tailrace.core.units import whole_number

if TYPE_CHECKING:
    from appliance.migrate.journal import Journal
    from appliance.migrate.migration import Migration
    from appliance.migrate.plan import TopicPlan
    from appliance.migrate.session import Session, Source

COLLECTED_OBJECTS = 1_000_000
LINE_S = 10.0
SILENT_S = 30.0
"""A run that writes nothing to its journal for this long is dead, or has lost a side."""
JSON_LINE_S = 1.0
Function = TypeVar("Function", bound=Callable[..., Any])


class Rate(click.ParamType[int]):
    """Bytes a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size = whole_number("rate_bytes", str(value).removesuffix("/s"))
        if size is None or size < 1:
            self.fail(f"{str(value)!r} is not a rate; write 50MB or 64MiB", param, ctx)
        return size


@click.group(
    cls=DefaultGroup,
    subcommand_metavar="--from CLUSTER | COMMAND [ARGS]...",
    epilog="`tailrace migrate run --help` has the options of a copy: --topics, --follow, --plan.",
)
def command() -> None:
    """Move topics from Kafka here, or back: settings, records, and the offsets of groups. A run
    that was killed goes on where it was; every record arrives once, in order.

    \b
    Example:
      tailrace migrate --from kafka:broker:9092 --topics 'shop.*' --plan
      tailrace migrate --from kafka:broker:9092 --topics 'shop.*' --follow
      tailrace migrate switch
    """


@contextmanager
def sentences() -> Iterator[None]:
    """Turn errors of migrations into those of the command line."""
    try:
        yield
    except MigrationError as error:
        raise click.ClickException(str(error)) from None
    except InterruptedSessionError as error:
        if isinstance(error.__cause__, NotReachableError):
            raise error.__cause__ from None
        raise click.ClickException(str(error)) from None


def name_option(function: Function) -> Function:
    """Add the option --name."""
    return click.option(
        "--name",
        default="default",
        show_default=True,
        help="Name of the migration: a run goes on with what an earlier one of its name has done.",
    )(function)


def config_option(function: Function) -> Function:
    """Add the option --kafka-config."""
    return click.option(
        "--kafka-config",
        "config_file",
        type=click.Path(exists=True, dir_okay=False),
        help="File of librdkafka's properties for the cluster, such as SASL and TLS.",
    )(function)


def to_option(function: Function) -> Function:
    """Add the option --to, of a migration that is found by its name."""
    return click.option(
        "--to",
        "kafka",
        metavar="kafka:HOST:PORT",
        help="The Kafka cluster of a migration on the way back, which has its journal.",
    )(function)


@command.command()
@click.option("--from", "source", metavar="kafka:HOST:PORT", help="The Kafka cluster to read.")
@click.option(
    "--to", "target", metavar="kafka:HOST:PORT", help="The Kafka cluster to write: the way back."
)
@click.option(
    "--topics",
    multiple=True,
    metavar="NAMES",
    help="Topics: names, or patterns such as 'shop.*', with commas between them. Default: those of "
    "the earlier run.",
)
@click.option(
    "--groups",
    multiple=True,
    metavar="NAMES",
    help="Groups whose offsets are moved: names or patterns; `none`. Default: all with offsets of "
    "these topics.",
)
@config_option
@name_option
@click.option("--plan", "only_plans", is_flag=True, help="Show what would be done; change nothing.")
@click.option("--follow", is_flag=True, help="Go on at the end of the source, until the switch.")
@click.option("--rate", type=Rate(), help="Copy at most so many bytes a second: 50MB.")
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    default="read_committed",
    show_default=True,
    help="read_committed leaves the records of aborted transactions out.",
)
@click.option(
    "--append",
    "appends",
    is_flag=True,
    help="Also write to topics of the target that have records; their offsets are mapped.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="SETTING",
    help="A topic setting that is not moved. Can be repeated.",
)
@bootstrap_option
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    source: str | None,
    target: str | None,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    config_file: str | None,
    name: str,
    only_plans: bool,
    follow: bool,
    rate: int | None,
    isolation: str,
    appends: bool,
    leave_out: tuple[str, ...],
    bootstrap: str,
    as_json: bool,
) -> None:
    """Copy topics up to their ends, with --follow further.

    \b
    Example:
      tailrace migrate --from kafka:broker:9092 --topics orders,payments --follow --rate 50MB
      tailrace migrate --to kafka:broker:9092 --topics orders
    """
    if bool(source) == bool(target):
        raise click.UsageError(
            "give --from kafka:HOST:PORT, or --to kafka:HOST:PORT for the way back"
        )
    arm_from_environment()
    with sentences():
        migration, printed = _migration(
            bool(source), str(source or target), name, topics, groups, config_file, bootstrap,
            as_json, rate=rate or 0, isolation=isolation, appends=appends, left_out=leave_out,
        )  # fmt: skip
        with ending_at_signals(migration, printed):
            if only_plans:
                ctx.exit(_show_plan(migration.plan(), as_json))
            is_complete = migration.run(follow=follow)
        _conclude(migration, printed, is_complete, as_json)
        ctx.exit(0 if is_complete or migration.is_stopped else 1)


@command.command()
@name_option
@config_option
@to_option
@click.option(
    "--force",
    is_flag=True,
    help="Switch although producers, consumers or transactions of the source still run.",
)
@bootstrap_option
@json_option
@click.pass_context
def switch(
    ctx: click.Context,
    name: str,
    config_file: str | None,
    kafka: str | None,
    force: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Copy what is left, wait until the lag is zero, set the offsets of groups a last time, and end
    the migration. A run with --follow ends by itself, with status 1. Stop the source's producers
    and consumers before.

    \b
    Example:
      tailrace migrate switch --name default
    """
    arm_from_environment()
    with sentences():
        session = _session_of(name, bootstrap, kafka, config_file)
        migration, printed = _migration(
            session["direction"] == "from", session["server"], name, (),
            tuple(session["groups"]) or ("none",), config_file or session["config_file"],
            bootstrap, as_json,
            isolation=session["isolation"], appends=session["appends"],
            left_out=tuple(session["left_out"]),
        )  # fmt: skip
        with ending_at_signals(migration, printed):
            is_complete = migration.run(switches=True, is_forced=force)
        _conclude(migration, printed, is_complete, as_json)
        ctx.exit(0 if is_complete else 1)


@command.command()
@name_option
@config_option
@to_option
@bootstrap_option
@json_option
def status(
    name: str, config_file: str | None, kafka: str | None, bootstrap: str, as_json: bool
) -> None:
    """Show how far a migration is, by what its journal has.

    \b
    Example:
      tailrace migrate status --json
    """
    from appliance.migrate.journal import Journal

    with sentences():
        journal = Journal(_peeked(name, bootstrap, kafka, config_file))
        if not journal.session:
            raise MigrationError(f"there is no migration {name}.")
    progress, session = journal.progress, journal.session
    at_ms = int(journal.ended_ms or max(progress.get("at_ms", 0), session["at_ms"]))
    state = state_of(journal, at_ms)
    is_known = state in ("copying", "switched")
    row = {
        "name": name,
        "direction": session["direction"],
        "server": session["server"],
        "topics": sorted({partition.topic for partition in journal.maps}),
        "partitions": len(journal.maps),
        "state": state,
        "records": progress.get("records", 0),
        "lag": progress.get("lag") if is_known else None,
        "at": _shown_time(at_ms),
    }
    if as_json:
        print_json(row)
        return
    lag = "unknown" if row["lag"] is None else f"{row['lag']:,}"
    echo(
        f"migration {name} {row['direction']} kafka:{row['server']}: {row['state']}; "
        f"{counted(row['records'], 'record')} in {counted(row['partitions'], 'partition')}, lag "
        f"{lag}, at {row['at']}"
    )
    if not is_known:
        echo(
            "no run copies now: start it again with the same command"
            if state == "stopped"
            else f"no run has written to the journal for {SILENT_S:.0f} s: it has ended, or has "
            "lost a side"
        )


def state_of(journal: Journal, at_ms: int) -> str:
    """The state of a migration. `at_ms`: its last sign of life."""
    if journal.switched_ms is not None:
        return "switched"
    if journal.ended_ms is not None:
        return "stopped"
    return "copying" if time.time() * 1_000 - at_ms < SILENT_S * 1_000 else "silent"


def _shown_time(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms // 1000, dt.UTC).isoformat().replace("+00:00", "Z")


def _peeked(
    name: str, bootstrap: str, kafka: str | None, config_file: str | None
) -> list[bytes | None]:
    """The values of a journal: the appliance's, or that of a Kafka cluster."""
    from appliance.migrate.clusters.kafka_client import KafkaCluster, properties_of, server_of
    from appliance.migrate.clusters.kafka_target import KafkaTarget
    from appliance.migrate.clusters.tailrace_target import TailraceTarget

    if kafka is not None:
        cluster = KafkaCluster(server_of(kafka), properties_of(config_file), complain)
        return KafkaTarget(cluster, name).peek()
    target = TailraceTarget(bootstrap, name, CONNECT_TIMEOUT_MS)
    try:
        return target.peek()
    finally:
        target.end()


def _session_of(
    name: str, bootstrap: str, kafka: str | None, config_file: str | None
) -> dict[str, Any]:
    """The last session of a migration. Raises MigrationError."""
    from appliance.migrate.journal import Journal

    journal = Journal(_peeked(name, bootstrap, kafka, config_file))
    if journal.switched_ms is not None:
        raise MigrationError(f"the migration {name} was switched already.")
    if not journal.session:
        raise MigrationError(
            f"there is no migration {name}: begin with `tailrace migrate --from kafka:HOST:PORT "
            "--topics NAMES --follow`."
        )
    return journal.session


def _migration(
    is_from: bool,
    address: str,
    name: str,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    config_file: str | None,
    bootstrap: str,
    as_json: bool,
    *,
    rate: int = 0,
    isolation: str = "read_committed",
    appends: bool = False,
    left_out: tuple[str, ...] = (),
) -> tuple[Migration, Printed]:
    """The migration. Raises MigrationError, NotReachableError."""
    import os

    from appliance.migrate.clusters.kafka_client import KafkaCluster, properties_of, server_of
    from appliance.migrate.clusters.kafka_source import KafkaSource
    from appliance.migrate.clusters.kafka_target import KafkaTarget
    from appliance.migrate.clusters.tailrace_source import TailraceCluster, TailraceSource
    from appliance.migrate.clusters.tailrace_target import TailraceTarget
    from appliance.migrate.groups import patterns_of
    from appliance.migrate.migration import Migration, Options, SourceCluster, TargetCluster
    from appliance.migrate.topic_settings import to_kafka, to_ours

    printed = Printed(as_json)
    server = server_of(address)
    cluster = KafkaCluster(server, properties_of(config_file), printed.note)
    cluster.topic_names()
    source: SourceCluster
    target: TargetCluster
    make_source: Callable[[str], Source]
    if is_from:
        ours = TailraceTarget(bootstrap, name, CONNECT_TIMEOUT_MS)
        ours.admin.list_topics()
        source, target, make_source = cluster, ours, partial(KafkaSource, cluster)
    else:
        here = TailraceCluster(bootstrap, CONNECT_TIMEOUT_MS)
        here.topic_names()
        source, target, make_source = (
            here,
            KafkaTarget(cluster, name),
            partial(TailraceSource, here),
        )
    options = Options(
        name, topics, patterns_of(groups), isolation, appends, left_out, rate,
        session={
            "direction": "from" if is_from else "to", "server": server, "isolation": isolation,
            "appends": appends, "left_out": list(left_out),
            "config_file": None if config_file is None else os.path.abspath(config_file),
        },
    )  # fmt: skip
    map_settings = to_ours if is_from else to_kafka
    return Migration(source, make_source, target, map_settings, options, printed), printed


@contextmanager
def ending_at_signals(migration: Migration, printed: Printed) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the copy at the next record; the second one ends it at once."""

    def stop(_number: int, _frame: object) -> None:
        if migration.is_stopped:
            sys.exit(128 + signal.SIGINT)
        migration.is_stopped = True

    former = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_OBJECTS)  # records are no cycles, and looking for some takes a third
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        for number, handler in former.items():
            signal.signal(number, handler)
        printed.end()
        migration.target.end()


class Printed:
    """Progress on the terminal, or as JSON lines."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._begun_s = self._line_s = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def note(self, sentence: str) -> None:
        """Print a sentence beside the progress."""
        if self._bar is not None:
            self._bar.console.print(f"tailrace: {sentence}", highlight=False, markup=False)
        else:
            complain(sentence)

    def progress(self, session: Session, lag: int) -> None:
        """Show how far the copy is."""
        del lag
        if not self._as_json and sys.stderr.isatty():
            self._show_bar(session)
            return
        now_s = time.monotonic()
        if now_s >= self._line_s + (JSON_LINE_S if self._as_json else LINE_S):
            self._line_s = now_s
            self._print_line(session, "copying")

    def caught_up(self, session: Session) -> None:
        """Print that the copy is at the end of the source."""
        if session.journal.switched_ms is None:
            self._print_line(session, "caught up")
        elif self._as_json:
            self._print_line(session, "switched")

    def _print_line(self, session: Session, state: str) -> None:
        import orjson

        counts, seconds = session.counts, max(1e-9, time.monotonic() - self._begun_s)
        if self._as_json:
            row = {
                "state": state, "records": counts.records, "bytes": counts.byte_count,
                "records_in_target": session.record_count,
                "records_per_second": round(counts.records / seconds, 1),
                "refused": list(session.refused.values()),
            }  # fmt: skip
            click.echo(orjson.dumps(row))
            return
        self.note(
            f"{state}: {counted(counts.records, 'record')}, {human_bytes(counts.byte_count)}, "
            f"{counts.records / seconds:,.0f} records/s"
        )

    def _show_bar(self, session: Session) -> None:
        now_s = time.monotonic()
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("copying", total=1, speed="")
            self._bar.start()
        elif now_s < self._line_s + 0.5:
            return
        self._line_s = now_s
        counts, seconds = session.counts, max(1e-9, now_s - self._begun_s)
        lag = session.last_lag
        self._bar.update(
            self._task,
            completed=counts.records,
            total=max(1, counts.records + lag) if lag >= 0 else None,
            speed=f"{counts.records:,} records, {human_bytes(counts.byte_count)}, "
            f"{human_bytes(int(counts.byte_count / seconds))}/s",
        )

    def end(self) -> None:
        """Take the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _show_plan(plans: list[TopicPlan], as_json: bool) -> int:
    """Print a plan. Returns the exit status."""
    if as_json:
        print_json(
            [
                {
                    "topic": plan.source.name, "partitions": plan.source.partition_count,
                    "offsets": plan.offset_count, "offsets_are": plan.offsets,
                    "settings": {**plan.mapped.configs, **plan.mapped.at_switch},
                    "notes": plan.mapped.notes, "refused": plan.refusals,
                }
                for plan in plans
            ]
        )  # fmt: skip
    else:
        print_table(
            ["TOPIC", "PARTITIONS", "RECORDS UP TO", "OFFSETS", "SETTINGS"],
            [
                [plan.source.name, plan.source.partition_count, plan.offset_count, plan.offsets,
                " ".join(
                    f"{name}={value}"
                    for name, value in {**plan.mapped.configs, **plan.mapped.at_switch}.items()
                )]
                for plan in plans
            ],
        )  # fmt: skip
        for plan in plans:
            for sentence in plan.mapped.notes:
                echo(f"{plan.source.name}: {sentence}")
            for sentence in plan.refusals:
                complain(sentence)
    return 1 if any(plan.refusals for plan in plans) else 0


def _conclude(migration: Migration, printed: Printed, is_complete: bool, as_json: bool) -> None:
    if migration.is_stopped and not as_json:
        printed.note("stopped; the same command goes on where it was")
    elif not is_complete and not as_json and not migration.is_taken_over:
        printed.note("not everything is copied: see the sentences above")
