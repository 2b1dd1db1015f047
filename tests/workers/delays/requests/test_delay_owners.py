"""Owners of delayed records: who is named by the front may change them, also after they were
moved, saved, read again or returned.
"""

from __future__ import annotations

from typing import Any, cast

from shm.messages.lane_messages import LaneKind
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.core.error_codes import ErrorCode
from tailrace.core.schedule.delays import delay_id, parse_delay_id
from tailrace.protocol.frame import Api
from tests.kit.stepped.delay_requests import DAY, PLACE, SECOND, Asking
from tests.kit.stepped.delays import LOG_ID, SCHEMA
from tests.kit.stepped.foreign_rows import encoded, foreign
from workers.delays.delay_partition import DelayPartition

ANN, BOB = 11, 22


def send(asking: Asking, owner: int, kind: LaneKind = LaneKind.PRODUCE_OWNED) -> int:
    """Send a delayed record that names an owner. Returns how many rows the worker took."""
    world = asking.world
    world.takes_foreign = True
    rows = arrow_batch.with_delays(foreign(1), SCHEMA, [world.wall_us + DAY], None)
    before = world.bench.table.read(1).high_watermark
    world.bench.send(encoded(rows, delay_position=owner), slot=1, kind=kind)
    world.settle()
    return int(world.bench.table.read(1).high_watermark - before)


def change(asking: Asking, token: str, owner: int | None, due_us: int | None = None) -> Any:
    item = {"delay_id": token, "due_us": due_us, "owner": owner}
    code, answer = asking.answered(Api.CHANGE_DELAYS, {"changes": [item]})
    assert code is ErrorCode.OK, answer
    (result,) = answer["results"]
    return ErrorCode(result["code"]), result.get("delay_id")


def test_a_client_that_names_an_owner_by_itself_is_refused() -> None:
    asking = Asking()
    assert send(asking, ANN, LaneKind.PRODUCE) == 0
    assert send(asking, ANN) == 1


def test_a_record_is_changed_by_its_owner_and_by_no_other_user() -> None:
    asking = Asking()
    send(asking, ANN)
    asking.world.schedule([DAY])
    first, unowned = (delay_id(LOG_ID, 0, offset, 0) for offset in (0, 1))
    assert change(asking, first, BOB) == (ErrorCode.NOT_AUTHORIZED, None)
    assert change(asking, unowned, BOB) == (ErrorCode.NOT_AUTHORIZED, None)
    assert change(asking, first, ANN) == (ErrorCode.OK, None)
    assert change(asking, unowned, None) == (ErrorCode.OK, None)


def test_a_record_keeps_its_owner_where_others_reschedule_it_together_with_theirs() -> None:
    asking = Asking()
    send(asking, ANN)
    send(asking, BOB)
    due_us = asking.world.wall_us + 2 * DAY
    items = [
        {"delay_id": delay_id(LOG_ID, 0, offset, 0), "due_us": due_us, "owner": None}
        for offset in (0, 1)
    ]
    _, answer = asking.answered(Api.CHANGE_DELAYS, {"changes": items})
    of_ann, of_bob = (result["delay_id"] for result in answer["results"])
    assert change(asking, of_ann, BOB) == (ErrorCode.NOT_AUTHORIZED, None)
    assert change(asking, of_bob, ANN) == (ErrorCode.NOT_AUTHORIZED, None)
    assert change(asking, of_ann, ANN) == (ErrorCode.OK, None)
    assert change(asking, of_bob, BOB) == (ErrorCode.OK, None)


def test_owners_are_kept_in_bucket_files_and_read_again_after_a_restart() -> None:
    asking = Asking()
    send(asking, ANN)
    _, moved = change(asking, delay_id(LOG_ID, 0, 0, 0), ANN, asking.world.wall_us + 3 * DAY)
    send(asking, BOB)
    asking.pass_time(12)  # behind SAVE_AFTER_NS
    store = asking.world.partition._store
    assert store.cursor > parse_delay_id(moved).offset
    assert not store.rows.unsaved_bytes
    asking.world.restart_scheduler()
    cast("dict[tuple[str, int], DelayPartition]", asking.requests._open)[PLACE] = (
        asking.world.partition
    )
    asking.pass_time(1)
    assert change(asking, moved, BOB) == (ErrorCode.NOT_AUTHORIZED, None)
    of_bob = delay_id(LOG_ID, 0, 2, 0)
    assert change(asking, of_bob, ANN) == (ErrorCode.NOT_AUTHORIZED, None)
    assert change(asking, of_bob, BOB, asking.world.wall_us + SECOND)[0] is ErrorCode.OK
    assert change(asking, moved, ANN) == (ErrorCode.OK, None)


def test_an_owner_that_is_no_number_is_an_invalid_request() -> None:
    asking = Asking()
    send(asking, ANN)
    for owner in (0, -ANN, "ann", True, 1 << 63):
        item = {"delay_id": delay_id(LOG_ID, 0, 0, 0), "due_us": None, "owner": owner}
        _, answer = asking.answered(Api.CHANGE_DELAYS, {"changes": [item]})
        assert answer["results"][0]["code"] == ErrorCode.INVALID_REQUEST, owner
