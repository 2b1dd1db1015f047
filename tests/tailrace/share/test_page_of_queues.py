"""docs/queues.md is true: its table is what the settings are. `tests/test_docs.py` runs its
snippets.
"""

from __future__ import annotations

import dataclasses

from tailrace.share.settings import ShareConsumerSettings
from tests.kit.runs.documents import ROOT, check_part


def test_the_table_of_settings() -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(ShareConsumerSettings)
    ]
    check_part(
        ROOT / "docs/queues.md",
        "share consumer settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows),
    )
