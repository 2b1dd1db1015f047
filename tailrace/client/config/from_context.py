"""`from_context`, a constructor that all clients have."""

from __future__ import annotations

from typing import Any, TypeVar

Client = TypeVar("Client", bound="FromContext")


class FromContext:
    """A client that takes the setting `context`."""

    @classmethod
    def from_context(cls: type[Client], context: str, *args: Any, **settings: Any) -> Client:
        """A client of the appliance that a context names, as its user. `context`: a name of
        `tailrace context list`, or a file of `tailrace user add --out`. Other arguments are the
        client's own. Raises InvalidSettingError.
        """
        return cls(*args, **{"context": context, **settings})
