"""A start without a compiled kernel says so, and what to do."""

from __future__ import annotations

import pytest

from appliance.supervise.preflight import warn_of_python_kernel
from tailrace import kernel


@pytest.mark.parametrize(
    ("compiled", "wished", "count"), [(False, "", 1), (False, "1", 0), (True, "", 0)]
)
def test_a_kernel_that_could_not_be_compiled_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: bool,
    wished: str,
    count: int,
) -> None:
    monkeypatch.setattr(kernel, "IS_COMPILED", compiled)
    monkeypatch.setenv("TAILRACE_PURE", wished)
    warn_of_python_kernel()
    assert caplog.text.count("kernel_not_compiled") == count
    assert caplog.text.count("python3-dev") == count
