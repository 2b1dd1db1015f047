"""docs/queues.md is true: its table is what the settings are, its snippet runs."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sys

from tailrace.share.settings import ShareConsumerSettings
from tests.test_docs import ROOT, check_part

PAGE = ROOT / "docs/queues.md"


def test_the_table_of_settings() -> None:
    rows = [f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n" for item in dataclasses.fields(ShareConsumerSettings)]
    check_part(PAGE, "share consumer settings", "| setting | default | |\n|---|---|---|\n" + "".join(rows))


def test_the_snippet_runs(tmp_path: pathlib.Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
