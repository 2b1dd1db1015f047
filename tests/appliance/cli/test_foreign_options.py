"""Habits of kcat and of Kafka's tools are answered with what to write here; `help` is taken."""

from __future__ import annotations

import pytest

from tests.kit.cli import run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("consume", "-t", "orders"), "There is no option -t; the topic is an argument"),
        (("consume", "--topic", "orders"), "There is no option --topic; the topic is an argument"),
        (("consume", "orders", "-b", "h:1"), "There is no option -b; write --bootstrap ADDRESS."),
        (("consume", "orders", "-o", "end"), "There is no option -o; write --offset N, --from-b"),
        (("consume", "orders", "-p", "0"), "There is no option -p; write --partition N."),
        (("consume", "orders", "-c", "1"), "There is no option -c; write --max N."),
        (("consume", "orders", "-e"), "There is no option -e; write --from-beginning, "),
        (("consume", "orders", "--max-messages", "1"), "option --max-messages; write --max N."),
        (("produce", "orders", "-b", "h:1"), "There is no option -b; write --bootstrap ADDRESS."),
        (("topic", "list", "--bootstrap-server", "h:1"), "option --bootstrap-server; write --boot"),
        (
            ("topic", "create", "--topic", "orders"),
            "There is no option --topic; the topic is an argument: tailrace topic create NAME.",
        ),
        (
            ("group", "describe", "--group", "x"),
            "the group is an argument: tailrace group describe",
        ),
        (("group", "reset-offsets", "-t", "x"), "There is no option -t; write --topic TOPIC."),
        (("topic", "--list"), "There is no option --list; write tailrace topic list."),
        (("topic", "--describe", "--topic", "x"), "--describe; write tailrace topic describe."),
        (("-C", "-t", "orders"), "There is no option -C; write tailrace consume TOPIC."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_of_another_tool_is_answered_with_the_one_that_is_meant(
    arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in run(None, *arguments, status=2).stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("topic", "ls"), "There is no command ls; write tailrace topic list."),
        (("topic", "rm", "x"), "There is no command rm; write tailrace topic delete."),
        (("topic", "show", "x"), "There is no command show; write tailrace topic describe."),
        (("acl", "delete"), "There is no command delete; write tailrace acl remove."),
        (("quota", "add"), "There is no command add; write tailrace quota set."),
        (("version",), "There is no command version; write tailrace --version."),
        (("topics",), "There is no command topics; write tailrace topic list."),
        (("topic", "set", "x"), "There is no command set; write tailrace topic alter."),
        (("stop",), "SIGTERM to `tailrace serve`, stops the appliance."),
        (("start",), "There is no command start; write tailrace serve."),
        (("tail", "x"), "There is no command tail; write tailrace consume."),
        (("backup", "ls", "/b"), "There is no command ls; write tailrace backup list."),
        (("backup", "verfy", "/b"), "No such command 'verfy'"),
        (
            ("list",),
            "no command list; write tailrace topic list or tailrace group list or tailrace user l",
        ),
        (("create", "x"), "no command create; write tailrace topic create or tailrace user add."),
        (("migrate", "show"), "There is no command show; write tailrace migrate status."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_of_another_tool_is_answered_with_the_one_that_is_meant(
    arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in run(None, *arguments, status=2).stderr.decode()


def test_a_misspelt_command_gets_the_nearest() -> None:
    assert "Did you mean" in run(None, "topic", "lits", status=2).stderr.decode()
    assert "No such command 'frobnicate'" in run(None, "frobnicate", status=2).stderr.decode()


def test_an_option_that_nobody_has_is_answered_as_before() -> None:
    assert (
        "No such option" in run(None, "consume", "orders", "--tali", "3", status=2).stderr.decode()
    )


def test_help_is_a_command() -> None:
    assert run(None, "help").stdout == run(None, "--help").stdout
    assert run(None, "help", "topic", "create").stdout == run(None, "topic", "create", "-h").stdout
