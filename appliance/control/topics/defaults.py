"""Defaults of topic settings that the appliance's settings replace: topics without a value of their
own follow them, existing ones too.

Owner: the controller.
Invariants:
- A topic whose settings change gets a new version, so that every process takes them.
- At most AT_ONCE topics are decided in a step.
Crash: the catalog knows which defaults the topics have (`meta`). A successor that finds others
decides the topics again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from appliance.catalog.catalog import Catalog, Topic
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.topics.change_queue import TopicChangeQueue
from tailrace.core.errors import TailraceError
from tailrace.format.crc32c import crc32c

logger = logging.getLogger(__name__)

AT_ONCE = 16
RETRY_NS = 1_000_000_000


class TopicDefaults:
    """The defaults in force, and the topics that do not have them yet."""

    def __init__(
        self,
        catalog: Catalog,
        topics: Mapping[str, Topic],
        publisher: MetadataPublisher,
        changes: TopicChangeQueue,
        defaults: dict[str, Any],
        *,
        is_restarted: bool,
    ) -> None:
        """`is_restarted`: other processes may have topics with the defaults of a predecessor."""
        self._catalog = catalog
        self._topics = topics
        self._publisher = publisher
        self._changes = changes
        self._defaults = defaults
        self._undecided: list[str] = []
        self._retry_at_ns = 0
        self._number = _number(defaults)
        if self._number != catalog.settings.topic_defaults_number() and is_restarted:
            self._undecided = list(topics)
        self._is_noted = False

    @property
    def is_waiting(self) -> bool:
        """True while topics wait for their new settings."""
        return bool(self._undecided)

    def change(self, defaults: dict[str, Any]) -> None:
        """Use other defaults."""
        changed = {
            name
            for name in {*defaults, *self._defaults}
            if defaults.get(name) != self._defaults.get(name)
        }
        if not changed:
            return
        self._defaults = defaults
        self._publisher.topic_defaults.clear()
        self._publisher.topic_defaults.update(defaults)
        self._number = _number(defaults)
        self._is_noted = False
        waiting = dict.fromkeys(self._undecided)
        waiting |= dict.fromkeys(
            topic.name for topic in self._topics.values() if not changed <= topic.given.keys()
        )
        self._undecided = list(waiting)
        logger.info(
            "topic_defaults_changed settings=%s topics=%d", ",".join(sorted(changed)),
            len(self._undecided),
        )  # fmt: skip

    def step(self, now_ns: int) -> int:
        """Decide some of the waiting topics again. Returns their number."""
        if now_ns < self._retry_at_ns or (self._is_noted and not self._undecided):
            return 0
        some, rest = self._undecided[:AT_ONCE], self._undecided[AT_ONCE:]
        try:
            for name in some:
                topic = self._topics.get(name)
                if topic is not None and topic.state != "deleting":
                    self._changes.redecide(topic)
            if not rest:
                self._catalog.settings.note_topic_defaults(self._number)
        except TailraceError as error:
            self._failed(some, now_ns, error)
            return 0
        self._undecided, self._is_noted = rest, not rest
        self._catalog.afterwards(lambda: None, lambda error: self._failed(some, now_ns, error))
        return len(some)

    def _failed(self, names: list[str], now_ns: int, error: TailraceError) -> None:
        logger.warning("topic_defaults_not_applied error=%r", error.detail)
        self._undecided = list(dict.fromkeys([*names, *self._undecided]))
        self._is_noted = False
        self._retry_at_ns = now_ns + RETRY_NS


def _number(defaults: Mapping[str, Any]) -> int:
    return crc32c(orjson.dumps(dict(defaults), option=orjson.OPT_SORT_KEYS))
