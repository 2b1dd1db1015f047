"""Delay owners: each delayed record belongs to the user who has sent it.

The front writes the number of the user into the header of each batch for a delay log, and into each
entry of a change by a user who may not `alter` the delays of its topic. The scheduler compares.

Owner: one front; pure.

Invariants:
- A number is that of a name: as with transactions, a later user of the same name owns what an
  earlier one has sent.
- A batch whose header is not proven is left as it is: its worker refuses it.
- The entry of a change names its sender, unless that one may alter the delays of the topic.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from shm.rights.acl import ALTER, DELAY
from shm.rights.authorizer import Principal
from tailrace.core.errors import TailraceError
from tailrace.core.schedule.delays import parse_delay_id
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import (
    BatchFormatError,
    checksum_seed,
    compute_header_crc,
    header_position,
    read_header,
)
from tailrace.format.record_batch.header_stamps import stamp_delay_owner

_NUMBERS = 1 << 61


def owner_number(user: str) -> int:
    """The number of a user as the owner of delayed records, from 1 on."""
    return 1 + int.from_bytes(blake2b(user.encode(), digest_size=8).digest(), "little") % _NUMBERS


def stamped(batch: Readable, topic_id: bytes, partition: int, owner: int) -> Readable | None:
    """A copy of a batch that names its owner, sealed again. None: its header is not proven."""
    seed = checksum_seed(topic_id, partition)
    owned = bytearray(batch)
    with memoryview(owned) as view:
        try:
            header = read_header(view)
        except BatchFormatError:
            return None
        position = header_position(view)
        if compute_header_crc(view, position, header.extension_length, seed) != (
            header.header_crc32c
        ):
            return None
        stamp_delay_owner(view, header, owner, seed)
    return owned


def with_owners(
    principal: Principal, request: dict[str, Any], topic_name: Callable[[str], str | None]
) -> dict[str, Any]:
    """A request to change delayed records, with the owner that each entry is allowed for in `owner`
    (null: every one).
    """
    items = request.get("changes")
    if not isinstance(items, list):
        return request
    own = owner_number(principal.user)
    return {
        **request,
        "changes": [
            {**item, "owner": None if _may_alter(principal, item, topic_name) else own}
            if isinstance(item, dict)
            else item
            for item in items
        ],
    }


def _may_alter(
    principal: Principal, item: dict[str, Any], topic_name: Callable[[str], str | None]
) -> bool:
    if principal.is_admin:
        return True
    try:
        name = topic_name(parse_delay_id(item.get("delay_id")).topic_id.hex())
    except TailraceError:
        return False
    return name is not None and principal.may(ALTER, DELAY, name)
