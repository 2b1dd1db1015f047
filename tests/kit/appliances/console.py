"""The console of a running appliance."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, wait_until


def console_of(appliance: EmbeddedAppliance) -> str:
    """Its address, from the log."""

    def found() -> list[str]:
        with open(appliance.log_path, encoding="utf-8") as log:
            return re.findall(r"console address=(\S+)", log.read())

    wait_until(lambda: bool(found()), "the console is bound")
    return found()[-1]


def get(address: str, path: str) -> tuple[int, str]:
    """(status, text)."""
    try:
        with urllib.request.urlopen(address + path, timeout=HANG_LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value."""
    status, text = get(address, "/metrics")
    assert status == 200
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
