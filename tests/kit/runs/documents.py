"""The documents, and their parts that are made from code.

With TAILRACE_WRITE_DOCS=1 a part that differs is written.
"""

from __future__ import annotations

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[3]


def check_part(path: pathlib.Path, name: str, requested: str) -> None:
    """The part of a document between its marks is `requested`."""
    text = path.read_text()
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(start)
    found, mark, after = rest.partition(end)
    assert mark, f"{path} has no part {name}"
    if os.environ.get("TAILRACE_WRITE_DOCS"):
        path.write_text(before + start + requested + end + after)
        return
    assert found == requested, (
        f"part {name} of {path.name} is not what the code says; see this module's docstring"
    )
