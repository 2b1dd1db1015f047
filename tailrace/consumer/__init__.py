"""The consumer: reads topics by assignment or as a member of a group."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.consumer.consumer import Consumer

__all__ = ["Consumer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tailrace.consumer import consumer

    return getattr(consumer, name)
