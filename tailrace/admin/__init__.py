"""Administration: topics, groups, delayed records, and the state of the appliance."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.admin.admin import Admin

__all__ = ["Admin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tailrace.admin import admin

    return getattr(admin, name)
