"""Tables of results into docs/performance.md and docs/measurements.md, between their marks. Nothing
else of the pages is touched.

The caller hands the tables in: `bench.doc_tables` makes them of a file of results.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.other_tree import ROOT

PAGES = (ROOT / "docs/performance.md", ROOT / "docs/measurements.md")


def put(text: str, name: str, table: str) -> str | None:
    """The page with `table` between its marks `<!-- name -->`. None when they are not there."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, opened, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        return None
    return before + start + table + end + after


def write(tables: Mapping[str, str]) -> list[str]:
    """Put each table between the marks of its name; returns the names. Raises ValueError without
    any.
    """
    if not tables:
        raise ValueError(
            "it has no budget, breadth or goals: give a file of bench-scale, bench-peers or "
            "bench-spark"
        )
    for name, table in tables.items():
        for page in PAGES:
            text = put(page.read_text(encoding="utf-8"), name, table)
            if text is not None:
                page.write_text(text, encoding="utf-8")
                break
        else:
            raise ValueError(f"no page has a part between <!-- {name} --> and <!-- /{name} -->")
    return list(tables)
