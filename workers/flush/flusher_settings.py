"""Settings of the flusher, from those of the appliance."""

from __future__ import annotations

from typing import Any, NamedTuple


class FlusherSettings(NamedTuple):
    """Sizes in bytes, times as their names say."""

    linger_ns: int = 0
    batch_bytes: int = 1 << 20
    checkpoint_bytes: int = 64 << 20
    journal_bytes: int = 64 << 20
    reserve_bytes: int = 0
    retention_check_ms: int = 3_600_000
    cleaner_check_ms: int = 15_000
    cleaner_dedupe_bytes: int = 128 << 20
    cleaner_bytes_per_second: int = 0

    @classmethod
    def of(cls, settings: dict[str, Any]) -> FlusherSettings:
        """Those of the appliance's settings."""
        return cls(
            int(settings["flush.linger_ms"]) * 1_000_000,
            int(settings["flush.batch_size"]),
            int(settings["checkpoint_bytes"]),
            int(settings["journal_bytes"]),
            int(settings["reserve_bytes"]),
            int(settings["retention.check.interval.ms"]),
            int(settings["cleaner.check.interval.ms"]),
            int(settings["cleaner.dedupe.buffer.size"]),
            int(settings["cleaner.io.max.bytes.per.second"]),
        )
