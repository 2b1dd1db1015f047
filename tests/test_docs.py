"""The documents are true: snippets run, named tests exist, links lead somewhere.

After a change that is meant, `TAILRACE_WRITE_DOCS=1 pytest tests/test_docs*.py` writes the
generated parts anew.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.kit.processes import HANG_LIMIT_S
from tests.kit.runs.documents import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("name", ["groups.md", "queues.md", "guarantees.md", "limits.md"])
def test_the_tests_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", text))
    defined = set(
        re.findall(
            r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
        )
    )
    assert named
    assert named <= defined


def test_links_lead_to_files() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (
                f"{path.name} links to {target}"
            )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_begins_with_its_title_and_its_tables_are_whole(path: pathlib.Path) -> None:
    """Rows of a table stood above the title of docs/kafka.md."""
    text = path.read_text()
    assert text.startswith("# "), text[:80]
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n?)+", plain, re.MULTILINE):
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert re.match(r"\|.*\n\|[-:| ]+\|(?:\n|$)", table), table[:200]
        assert len(set(rows)) == 1, table[:200]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_lines_of_at_most_100_columns(path: pathlib.Path) -> None:
    """Tables and programs have lines of any length, and so have lines of one long word."""
    plain = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    plain = re.sub(r"^<!-- (.*) -->$.*?^<!-- /\1 -->$", "", plain, flags=re.DOTALL | re.MULTILINE)
    for line in plain.splitlines():
        is_one_word = max(map(len, line.split()), default=0) > 80
        assert len(line) <= 100 or is_one_word or line.startswith(("|", "#", "    ")), line


@functools.cache
def _anchors(path: pathlib.Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_lead_to_headings() -> None:
    for path in DOCUMENTS:
        for page, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", path.read_text()):
            target = path.parent / page if page else path
            assert page.startswith("http") or anchor in _anchors(target), (
                f"{path.name} links to {page}#{anchor}"
            )


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.-]+\.md)", (ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def test_no_page_has_a_heading_twice() -> None:
    """The second one's anchor leads to the first, and the two say the same thing twice, or
    differ.
    """
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert path.name == "CHANGELOG.md" or len(headings) == len(set(headings)), path.name


SNIPPETS_PROGRAM = """
import contextlib, json, sys
import tailrace

page, snippets = sys.argv[1], json.load(sys.stdin)
start = tailrace.embedded

@contextlib.contextmanager
def empty():
    # The page's one appliance, as empty as a new one.
    yield appliance
    with tailrace.Admin(appliance.address) as admin:
        admin.delete_groups(list(admin.list_groups()))
        admin.delete_topics(admin.list_topics())

def embedded(**settings):
    return start(**settings) if settings else empty()

with start() as appliance:
    tailrace.embedded = embedded
    for number, snippet in enumerate(snippets, 1):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        *(
            ROOT / "docs" / f"{name}.md"
            for name in ("export", "groups", "queues", "scan", "sdk", "table", "transactions")
        ),
    ],
    ids=lambda path: path.name,
)
def test_python_snippets_run(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Those of spark.md run in tests/spark_bridge/test_page.py."""
    snippets = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    snippets = [
        snippet for snippet in snippets if not snippet.startswith("spark.")
    ]  # tests/spark_bridge/test_datasource.py reads so
    assert snippets
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS_PROGRAM, path.name],
        input=json.dumps(snippets), capture_output=True, text=True,
        timeout=HANG_LIMIT_S, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
