"""The topics of a fuzzer's run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tailrace.client.topics.topic_metadata import TopicInfo


@dataclass(slots=True)
class Target:
    """A partition that batches are made for, and some of those."""

    info: TopicInfo
    partition: int
    batches: list[bytes]

    @property
    def seed(self) -> int:
        return self.info.seeds[self.partition]


@dataclass(slots=True)
class World:
    """The topics of a run."""

    start_us: int
    names: list[str] = field(default_factory=list)
    """Topics that stay; scratch topics have names of their own."""
    targets: list[Target] = field(default_factory=list)
    delayed: list[Target] = field(default_factory=list)
    """Delay logs."""
    gone_id: bytes = b""
    """Id of a topic that was deleted before the run."""
    without: frozenset[int] = frozenset()
    """APIs that are left alone: what is known of them would hide the rest."""

    def any_target(self, rng: random.Random) -> Target:
        return rng.choice(self.delayed if rng.random() < 0.25 else self.targets)
