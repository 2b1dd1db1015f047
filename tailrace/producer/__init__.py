"""The producer: accumulates records in batches and sends them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.producer.producer import Producer

__all__ = ["Producer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tailrace.producer import producer

    return getattr(producer, name)
