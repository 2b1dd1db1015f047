"""The columns of a read of topics without a type: known without pyarrow, and still those of the
batches.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from spark_bridge.source.read_options import parse_options
from spark_bridge.source.spark_types import spark_schema
from spark_bridge.source.topic_columns import columns_of, spark_columns
from tests.kit.processes import HANG_LIMIT_S


@pytest.mark.parametrize("headers", ["true", "false"])
@pytest.mark.parametrize(
    "more",
    [{}, {"includeMetadata": "true"}, {"columns": "offset,headers,_topic"}],
    ids=["usual", "metadata", "chosen"],
)
def test_columns_are_those_that_the_batches_have(headers: str, more: dict[str, str]) -> None:
    options = parse_options({"subscribePattern": "t.*", "includeHeaders": headers, **more})
    assert spark_columns(options, {}) == spark_schema(columns_of(options, {}))


PROGRAM = """
import sys
import spark_bridge.datasource
import spark_bridge.environment
import tailrace.admin.admin
from spark_bridge.source.read_options import parse_options
from spark_bridge.source.topic_columns import spark_columns
assert spark_columns(parse_options({"subscribePattern": "t.*"}), {}).names[0] == "key"
print([name for name in ("pyarrow", "numpy", "pandas") if name in sys.modules])
"""


def test_the_process_that_is_asked_for_them_loads_no_arrow() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=True,
    )
    assert done.stdout == "[]\n"
