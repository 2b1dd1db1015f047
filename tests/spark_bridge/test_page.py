"""The snippets of docs/spark.md run: in the session that there is, for to start one for each takes
most of a minute.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
from typing import Any

import pytest

from spark_bridge import session

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]
PAGE = pathlib.Path(__file__).parents[2] / "docs/spark.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "snippet", SNIPPETS, ids=[str(number + 1) for number in range(len(SNIPPETS))]
)
def test_the_snippets_of_the_page_run(
    spark: Any,
    snippet: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A snippet that starts a session, and ends it, finds this one and leaves it. test_sessions.py
    shows that sessions start.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "local_session", lambda **_named: contextlib.nullcontext(spark))
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)
    exec(compile(snippet, str(PAGE), "exec"), {"__name__": "__main__"})
    assert capfd.readouterr().out, "it shows what it has made"
