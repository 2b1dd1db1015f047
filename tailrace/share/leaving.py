"""The end of a share consumer: what it sends before it leaves its group, and how long it waits.

Owner: one share consumer, in one thread or event loop.

Invariants:
- Acknowledgements go before the member leaves, or the log says that they did not.
- Records that were not read are released, so that others get them at once.
- Each wait has a bound. Errors are logged, not raised.
"""

from __future__ import annotations

from tailrace.client.connections.steps import PAUSE, Steps, Wait
from tailrace.core.errors import NotReachableError, TailraceError
from tailrace.core.log import logger
from tailrace.group.heartbeat import LEAVE_STEP_NS, LEAVE_WAIT_NS
from tailrace.share.delivery import NS_PER_MS
from tailrace.share.poll_loop import SharePollLoop

CLOSE_COMMIT_MS = 5_000


def leave(loop: SharePollLoop) -> Steps[None]:
    """Send the acknowledgements, release unread records and leave the group, which releases all
    other records.
    """
    if not loop.connection.is_usable:
        return
    loop.delivery.register()
    loop.delivery.release_unread(loop.delivery.buffered.clear())
    until_ns = loop.now_ns() + CLOSE_COMMIT_MS * NS_PER_MS
    try:
        yield from _until_ready(loop, until_ns)
        yield from _release_ranges(loop)
        yield from loop.write_dead_letters(with_rejected=True)
        until_ns = loop.now_ns() + CLOSE_COMMIT_MS * NS_PER_MS
        yield from loop.flush(until_ns)
        # The response to a request in flight may have acquired more.
        yield from _release_ranges(loop)
        yield from loop.flush(until_ns)
    except TailraceError as error:
        logger.warning(
            "share_close_without_commit group=%s reason=%s: the records come again",
            loop.settings.group_id,
            error,
        )
    refused = loop.requests.drain_failed()
    if refused is not None:
        logger.warning(
            "share_acknowledgements_refused group=%s %s", loop.settings.group_id, refused.detail
        )
    loop.member.leave()
    until_ns = loop.now_ns() + LEAVE_WAIT_NS
    while (now_ns := loop.now_ns()) < (wait_ns := loop.member.leaves_until_ns(until_ns)):
        yield Wait(loop.member.wait_until_ns(min(wait_ns, now_ns + LEAVE_STEP_NS)))
        loop.connection.process()
        loop.member.heartbeat_step()


def _until_ready(loop: SharePollLoop, until_ns: int) -> Steps[None]:
    """Wait for the connection if the appliance is to be told something. An interrupted call has
    given its socket up. Raises NotReachableError after `until_ns`.
    """
    connection = loop.connection
    while not connection.is_ready and _has_unsent(loop):
        connection.process()
        connection.tick(loop.now_ns())
        if loop.connection.is_ready:
            return
        if connection.fatal is not None:
            raise connection.fatal
        now_ns = loop.now_ns()
        if now_ns >= until_ns:
            raise NotReachableError(
                f"no appliance answers at {connection.address}{connection.peer_error_suffix()}"
            )
        wake_ns = min(until_ns, connection.next_tick_ns() or until_ns)
        yield Wait(wake_ns) if wake_ns > now_ns else PAUSE


def _has_unsent(loop: SharePollLoop) -> bool:
    """True if an acknowledgement, a release or a dead letter is not done."""
    return (
        loop.requests.is_busy
        or loop.fetch_loop.has_ranges
        or loop.acknowledgements.has_acknowledged
        or bool(loop.undeliverable)
    )


def _release_ranges(loop: SharePollLoop) -> Steps[None]:
    """Release the acquired ranges that were not read, also of topics that are not known yet."""
    if loop.fetch_loop.needs_topics:
        loop.lost_locks.forget_topics((yield from loop.fetch_loop.learn_topics()))
    loop.delivery.release_unread(loop.fetch_loop.forget_ranges())
