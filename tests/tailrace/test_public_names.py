"""Public names of `tailrace`: complete, described, and loaded only when it is used."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys
from typing import get_type_hints

import pytest

import tailrace
from tailrace.client.config.from_context import FromContext
from tailrace.client.config.setting_fields import build
from tailrace.client.config.settings import AdminSettings, ConsumerSettings, ProducerSettings
from tailrace.consumer.table.settings import TableSettings
from tailrace.core import errors
from tailrace.share.settings import ShareConsumerSettings

LAZY = """
import sys
import tailrace
assert {name for name in sys.modules if name.startswith("tailrace")} == {"tailrace"}
tailrace.TopicPartition, tailrace.TailraceError, tailrace.Recurrence
assert "zmq" not in sys.modules
tailrace.Admin, tailrace.NewTopic("t", 2, {"retention.ms": "1d"})
assert not {"pyarrow", "numpy", "pandas", "asyncio"} & set(sys.modules)
tailrace.aio.AsyncAdmin
assert not {"pyarrow", "numpy", "pandas"} & set(sys.modules)
tailrace.aio.AsyncConsumer, tailrace.aio.AsyncProducer, tailrace.aio.AsyncTable
assert "pandas" not in sys.modules
"""


def test_the_names_are_all_there_and_no_others() -> None:
    shown = set(dir(tailrace))
    assert shown - {"aio", "idempotent"} == {*tailrace.__all__, "__version__"}
    for name in tailrace.__all__:
        assert getattr(tailrace, name).__name__ == name
    raised = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, tailrace.TailraceError)
    }
    assert raised <= shown, "every error can be caught by its name"
    with pytest.raises(AttributeError, match="no attribute 'producr'"):
        _ = tailrace.producr  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'KafkaConsumer'; it is tailrace\.Consumer$"):
        _ = tailrace.KafkaConsumer  # type: ignore[attr-defined]
    for name, here in tailrace._CALLED_OTHERWISE.items():
        assert name not in shown
        assert getattr(
            tailrace.aio if here.startswith("aio.") else tailrace, here.removeprefix("aio.")
        )
    for name, here in tailrace._EARLIER_NAMES.items():
        assert getattr(tailrace, name) is getattr(tailrace, here)
    assert set(dir(tailrace.aio)) == set(tailrace.aio.__all__) == tailrace.aio._HOMES.keys()
    for name in tailrace.aio.__all__:
        assert getattr(tailrace.aio, name).__name__ == name
    assert issubclass(tailrace.ConsumerRebalanceListener, tailrace.RebalanceListener)


def test_type_checkers_are_told_the_names_that_there_are() -> None:
    stub = pathlib.Path(tailrace.__file__).with_suffix(".pyi").read_text()
    told = {
        name.name: node.module
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert told.keys() - {"aio", "idempotent"} == set(tailrace.__all__)
    for module, names in tailrace._NAMES.items():
        assert {told[name] for name in names} == {f"tailrace.{module}"}


def test_what_a_name_needs_is_loaded_when_it_is_used() -> None:
    subprocess.run([sys.executable, "-P", "-c", LAZY], check=True)


def test_every_name_and_every_method_says_what_it_is() -> None:
    for name in tailrace.__all__:
        value = getattr(tailrace, name)
        assert inspect.getdoc(value), name
        own = (
            [(key, item) for key, item in vars(value).items() if not key.startswith("_")]
            if inspect.isclass(value)
            else []
        )
        for key, item in own:
            if inspect.isfunction(item) or isinstance(item, (property, classmethod, staticmethod)):
                assert inspect.getdoc(getattr(value, key)), f"{name}.{key}"


def test_every_client_takes_a_context_in_place_of_an_address() -> None:
    for name in ("Producer", "Consumer", "ShareConsumer", "Table", "Admin"):
        assert "    context = None: " in (inspect.getdoc(getattr(tailrace, name)) or "")
        for client in (getattr(tailrace, name), getattr(tailrace.aio, f"Async{name}")):
            assert issubclass(client, FromContext)
    given = {"context": "shop.context"}
    for built in (
        build(ShareConsumerSettings, {"group_id": "g", **given}), build(TableSettings, given),
        tailrace.aio.AsyncTable.from_context("shop.context", "t").settings,
    ):  # fmt: skip
        assert built.bootstrap_servers == "context:shop.context"


@pytest.mark.parametrize(
    ("client", "settings"),
    [
        (tailrace.Producer, ProducerSettings),
        (tailrace.Consumer, ConsumerSettings),
        (tailrace.Admin, AdminSettings),
    ],
)
def test_help_lists_every_setting_with_its_default(client: type, settings: type) -> None:
    described = inspect.getdoc(client) or ""
    for name in get_type_hints(settings):
        assert f"    {name} = " in described
    assert "with tailrace." in described, "it begins with an example"
    assert "0x" not in str(inspect.signature(client)), (
        "no addresses of objects in what a newcomer reads"
    )


RELIED_ON = {
    "Producer": "send send_arrow flush partitions_for metrics close init_transactions transaction "
    "begin_transaction send_offsets_to_transaction commit_transaction abort_transaction",
    "Consumer": "assign subscribe poll poll_arrow seek seek_to_beginning seek_to_end position "
    "positions committed commit commit_async pause resume paused assignment offsets_for_times "
    "beginning_offsets end_offsets lag metrics group_metadata retry_later close",
    "ShareConsumer": "poll acknowledge commit close",
    "Admin": "create_topics delete_topics list_topics describe_topics alter_topics "
    "create_partitions describe_configs list_groups describe_groups list_group_offsets "
    "alter_group_offsets delete_groups delete_records describe_cluster cancel_delays "
    "reschedule_delays list_delays close",
}
SETTINGS_RELIED_ON = {
    "Producer": "acks linger_ms batch_size compression_type buffer_memory max_block_ms "
    "max_request_size max_in_flight_requests_per_connection enable_idempotence retries "
    "retry_backoff_ms delivery_timeout_ms request_timeout_ms partitioner client_id "
    "transactional_id transaction_timeout_ms context",
    "Consumer": "group_id group_instance_id auto_offset_reset enable_auto_commit "
    "auto_commit_interval_ms session_timeout_ms heartbeat_interval_ms max_poll_interval_ms "
    "max_poll_records fetch_min_bytes fetch_max_bytes fetch_max_wait_ms isolation_level "
    "partition_assignment_strategy context",
}


@pytest.mark.parametrize("name", RELIED_ON)
def test_methods_and_settings_that_programs_rely_on_are_there_in_both_worlds(name: str) -> None:
    plain, of_a_loop = getattr(tailrace, name), getattr(tailrace.aio, f"Async{name}")
    for method in RELIED_ON[name].split():
        arguments = list(inspect.signature(getattr(plain, method)).parameters)
        assert list(inspect.signature(getattr(of_a_loop, method)).parameters) == arguments, method
    described = inspect.getdoc(plain) or ""
    for setting in SETTINGS_RELIED_ON.get(name, "").split():
        assert f"    {setting} = " in described
