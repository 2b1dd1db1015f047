"""Cache of the kernel's BatchShape objects, by which it checks batches of a schema.

Invariants:
- Partitions with the same layout share one `BatchShape` while any of them uses it.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from tailrace.format.record_batch.arrow_metadata import SchemaLayout
from tailrace.kernel import BatchShape

_shapes: WeakValueDictionary[SchemaLayout, BatchShape] = WeakValueDictionary()


def shape_of(layout: SchemaLayout) -> BatchShape:
    """The BatchShape of `layout`."""
    shape = _shapes.get(layout)
    if shape is None:
        shape = _shapes[layout] = BatchShape(layout)
    return shape
