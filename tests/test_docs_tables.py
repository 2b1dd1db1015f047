"""Tables of the documents are what the code says: errors, settings, commands, versions, layouts."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator

import click
import pytest

from appliance.cli.main import tailrace
from appliance.config.files.default_file import in_toml
from appliance.config.setting_definition import Definition
from appliance.config.settings import definitions
from appliance.config.topic_settings import LATER, TOPIC_SETTINGS
from netfront.kafka.apis.table import APIS
from netfront.kafka.wire.definitions import definitions as definitions_of_kafka
from tailrace.client.config.settings import ConsumerSettings, ProducerSettings
from tailrace.consumer.table.settings import TableSettings
from tailrace.core.error_codes import ERROR_TABLE
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.protocol import fetch_messages, produce_messages
from tailrace.protocol import frame as wire
from tailrace.protocol.frame import (
    API_VERSIONS,
    Api,
)
from tailrace.scanning.options import ScanSettings
from tests.kit.runs.documents import ROOT, check_part


def test_the_error_table() -> None:
    rows = [
        f"| {int(c)} | {c.name} | {'yes' if r.retriable else 'no'} | {r.meaning} | {r.advice} |\n"
        for c, r in ERROR_TABLE.items()
    ]
    check_part(
        ROOT / "docs/protocol.md",
        "errors",
        "| number | name | retriable | meaning | what to do |\n|---|---|---|---|---|\n"
        + "".join(rows),
    )


def plain_value(value: object) -> str:
    """A topic setting's value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_row(definition: Definition) -> str:
    """A row of docs/configuration.md."""
    default = in_toml(definition.default).replace("|", "\\|")
    values = f"{definition.range_text}{f' {definition.unit}' if definition.unit else ''}"
    change = "reload" if definition.is_live else "restart"
    return (
        f"| `{definition.name}` | `{default}` | {values} | {change} | {definition.since} | "
        f"{definition.doc} |\n"
    )


def test_the_table_of_the_appliances_settings() -> None:
    check_part(
        ROOT / "docs/configuration.md",
        "settings",
        "| setting | default | values | applied by | since | |\n|---|---|---|---|---|---|\n"
        + "".join(setting_row(definition) for definition in definitions().values()),
    )


def test_the_settings_tables() -> None:
    rows = [
        f"| `{s.name}` | `{plain_value(s.default)}` | {s.doc} |\n" for s in TOPIC_SETTINGS.values()
    ]
    later = (
        "\nNot in this version, and refused rather than ignored: "
        f"{', '.join(f'`{name}`' for name in LATER)}.\n"
    )
    check_part(
        ROOT / "docs/operations.md",
        "topic settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows) + later,
    )


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below `group`, with what is typed for it."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_the_table_of_commands() -> None:
    rows = [
        f"| `{path}` | {command.get_short_help_str(200)} |\n"
        for path, command in commands(tailrace, "tailrace")
    ]
    assert len(rows) > 20
    check_part(ROOT / "docs/cli.md", "commands", "| command | |\n|---|---|\n" + "".join(rows))


@pytest.mark.parametrize(
    ("part", "kind"),
    [("producer settings", ProducerSettings), ("consumer settings", ConsumerSettings)],
)
def test_the_tables_of_the_clients_settings(part: str, kind: type) -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(kind)
    ]
    check_part(
        ROOT / "docs/sdk.md", part, "| setting | default | |\n|---|---|---|\n" + "".join(rows)
    )


def test_the_table_of_a_scans_settings() -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(ScanSettings)
    ]
    check_part(
        ROOT / "docs/scan.md",
        "scan settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows),
    )


def test_the_table_of_a_tables_settings() -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(TableSettings)
    ]
    check_part(
        ROOT / "docs/table.md",
        "table settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows),
    )


def test_the_table_of_versions() -> None:
    rows = [
        f"| {Api(api).name} | {int(api)} | {low} to {high} |\n"
        for api, (low, high) in API_VERSIONS.items()
    ]
    check_part(
        ROOT / "docs/protocol.md",
        "versions",
        "| API | number | versions |\n|---|---|---|\n" + "".join(rows),
    )


def test_the_table_of_kafkas_apis() -> None:
    rows = [
        f"| {definitions_of_kafka()[str(api)]['name']} | {api} | {row.low} to {row.high} |\n"
        for api, row in sorted(APIS.items())
    ]
    check_part(
        ROOT / "docs/kafka.md",
        "kafka apis",
        "| API | number | versions |\n|---|---|---|\n" + "".join(rows),
    )


TYPES = {"16s": "16s", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}


def layout_of(text: str) -> str:
    """`name type | name type ...`, as a page writes it, in the notation of `struct`."""
    return "<" + "".join(TYPES[kind] for kind in re.findall(r"\w+ (16s|[iu]\d\d)\b", text))


def test_layouts_are_those_of_the_codec() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    blocks = {
        name: re.split("then count times\n", text)
        for name, text in re.findall(
            r"^(\w+ (?:request|response)(?: \d)?) {2,4}([^`]*?)(?=^\w|^```)", page, re.M
        )
    }
    found = {name: [layout_of(part) for part in parts] for name, parts in blocks.items()}
    assert found == {
        "PRODUCE request": [
            produce_messages._PRODUCE_MANY.format,
            produce_messages._PRODUCE_ENTRY.format.replace("4x", "I"),
        ],
        "PRODUCE response": [
            produce_messages._PRODUCED_MANY.format,
            produce_messages._PRODUCED_ENTRY.format,
        ],
        "PRODUCE request 1": [produce_messages._PRODUCE.format],
        "PRODUCE response 1": [produce_messages._PRODUCED.format],
        "FETCH request": [fetch_messages._FETCH.format, fetch_messages._FETCH_ENTRY.format],
        "FETCH response": [fetch_messages._FETCHED.format, fetch_messages._FETCHED_ENTRY.format],
    }
    rows = re.findall(
        r"^\|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$",
        page[page.index("| request header") : page.index("- **Correlation")],
        re.M,
    )[2:]
    assert [layout_of(" ".join(row[side] for row in rows)) for side in (1, 3)] == [
        wire._REQUEST.format,
        wire._RESPONSE.format,
    ]
    for side in (0, 2):
        offsets = [int(row[side]) for row in rows if row[side].strip()]
        sizes = [struct.calcsize(layout_of(row[side + 1])) for row in rows if row[side].strip()]
        assert offsets == [sum(sizes[:number]) for number in range(len(sizes))]


def test_every_field_of_a_batch_header_is_explained() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    section = page[
        page.index("### The header of a batch") : page.index("A malformed header is answered")
    ]
    named = set(
        re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"^\| ([a-z_0-9, ]+) \|", section, re.M)))
    )
    fields = {field.name for field in dataclasses.fields(BatchHeader)} | {
        "header_length",
        "version",
        "magic",
    }
    assert named - {"field"} == fields
