"""The codecs that Kafka producers use, by partition: how `compression.type=producer` is served.

The log stores batches in Arrow's form, without the codec that a Kafka producer has packed them
with. The gateway remembers it: batches leave as the partition's last producer has packed its own.
Readers of that topic have that codec's library, as with Kafka.

Owner: one gateway, in memory.

Invariants:
- At most PARTITIONS_MAX partitions; the one that was written longest ago goes first.

Crash: batches leave uncompressed until a producer sends the next one.
"""

from __future__ import annotations

from collections import OrderedDict

from netfront.kafka.apis.call import Services
from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.compression import CODECS
from netfront.kafka.wire.definitions import Readable
from shm.messages.lane_messages import Assignment

PARTITIONS_MAX = 100_000
NONE = CODECS[0]
ZSTD = CODECS[-1]
ZSTD_FETCH_VERSION = 10
"""The first version of Fetch whose clients know zstd."""
ZSTD_PRODUCE_VERSION = 7
Codecs = OrderedDict[tuple[bytes, int], str]


def _codecs(services: Services) -> Codecs:
    found: Codecs = services.state.setdefault("codecs", OrderedDict())
    return found


def note_codec(services: Services, route: Assignment, records: Readable) -> None:
    """Remember the codec of record batches that were accepted."""
    codecs, place = _codecs(services), (route.topic_id, route.partition)
    codec = CODECS[layout.read_kafka_header(records).attributes & layout.CODEC_MASK]
    if codecs.get(place, NONE) == codec:
        return
    codecs.pop(place, None)
    if codec != NONE:
        codecs[place] = codec
        if len(codecs) > PARTITIONS_MAX:
            codecs.popitem(last=False)


def codecs_of_producer(version: int) -> int:
    """The number of codecs, from the first, that clients of a version of Produce know."""
    return len(CODECS) - (version < ZSTD_PRODUCE_VERSION)


def is_unknown_codec(route: Assignment, version: int) -> bool:
    """True if a topic is set to a codec that clients of this version of Fetch do not know."""
    return version < ZSTD_FETCH_VERSION and route.settings.get("compression.type") == ZSTD


def fetch_codec_of(services: Services, route: Assignment, version: int) -> str:
    """The codec that batches of a partition leave with to a client of this version of Fetch.

    With `compression.type=producer` one that does not know the producer's gets none.
    """
    codec = codec_of(services, route)
    return NONE if version < ZSTD_FETCH_VERSION and codec == ZSTD else codec


def codec_of(services: Services, route: Assignment) -> str:
    """The codec that batches of a partition leave with."""
    chosen = str(route.settings.get("compression.type", NONE))
    if chosen != "producer":
        return chosen
    return _codecs(services).get((route.topic_id, route.partition), NONE)
