"""Check of one partition's files: segments, their indexes, transaction indexes and delay files.

Owner: reads only; changes nothing and takes no lock.
Invariants: everything that cannot be read is reported as a finding, with the offsets that are lost
by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from appliance.observe.checks.findings import Finding, Severity, Totals
from tailrace.format.directory.data_dir import SWAP_FILE
from tailrace.format.directory.delay_files import (
    BUCKET_SUFFIX,
    DAMAGED_SUFFIX,
    KIND_ROWS,
    PENDING_FILE,
    BucketEntry,
    Manifest,
    PendingDamagedError,
    proven,
    walk_chunks,
)
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import (
    CONTROL_ABORT,
    NO_PRODUCER,
    SEQUENCE_MODULUS,
    BatchHeader,
)
from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    OLD_SEGMENT_SUFFIX,
    Ending,
    Walk,
    file_name,
    find_behind,
    first_batch_position,
    schema_message_length,
    segment_bases,
    walk_batches,
)
from tailrace.format.segments.segment_index import IndexEntry
from tailrace.format.segments.transaction_index import (
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    TransactionIndexDamagedError,
    decode_transaction_index,
)
from tailrace.format.unfinished_swap import replaced_segments


class PartitionCheck:
    """The check of one directory. Its findings go into the totals."""

    def __init__(self, directory: str, totals: Totals, advance: Callable[[int], None]) -> None:
        self._directory = directory
        self._totals = totals
        self._advance = advance
        self._append_us = 0
        self._sequences: dict[int, tuple[int, int]] = {}
        """producer id -> (epoch, next sequence)"""
        self._transactional: dict[int, dict[tuple[int, int], int]] = {}
        """segment base -> (producer id, epoch) -> the last offset of its batches there"""
        self._markers: dict[tuple[int, int], tuple[int, int]] = {}
        """(producer id, epoch) -> (control type, offset) of its marker"""

    def _find(
        self, severity: Severity, path: str, text: str, first: int = -1, last: int = -1
    ) -> None:
        self._totals.findings.append(Finding(severity, path, text, first, last))

    def run(self) -> None:
        self._totals.partitions += 1
        path = f"{self._directory}/{PARTITION_FILE}"
        known = None
        if os.path.exists(path):
            with open(path, "rb") as file:
                known = PartitionMetadata.decode(file.read())
        if known is None:
            self._find(
                Severity.DAMAGE,
                path,
                "missing or damaged: it identifies the partition of the batches, which cannot "
                "be checked without it",
            )
            return
        if known.offline:
            self._find(Severity.NOTE, path, f"takes no writes: {known.offline}")
        for damage in known.damage:
            self._find(
                Severity.NOTE,
                self._directory,
                "reported as lost before",
                damage.start,
                damage.end - 1,
            )
        names = os.listdir(self._directory)
        old = segment_bases(names, OLD_SEGMENT_SUFFIX)
        try:
            replaced = replaced_segments(self._directory, names)
        except OSError as error:
            self._find(Severity.DAMAGE, f"{self._directory}/{SWAP_FILE}", str(error.strerror))
            replaced = frozenset()
        bases = sorted({*segment_bases(names), *old})
        if not replaced.isdisjoint(bases):
            text = "a cleaned segment has taken the place of others, which the next start removes"
            self._find(Severity.NOTE, self._directory, text)
            bases = [base for base in bases if base not in replaced]
        if old:
            text = (
                f"{len(old)} segments have the suffix {OLD_SEGMENT_SUFFIX} of an older build; "
                "the next start renames them"
            )
            self._find(Severity.REPAIRABLE, self._directory, text)
        if bases and bases[0] > known.log_start_offset:
            self._find(
                Severity.DAMAGE,
                self._directory,
                "segments are missing at the beginning",
                known.log_start_offset,
                bases[0] - 1,
            )
        for number, base in enumerate(bases):
            self._check_segment(known, base, bases[number + 1] if number + 1 < len(bases) else None)
        for base, transactional in self._transactional.items():
            self._check_transaction_index(known, base, transactional)
        if os.path.exists(f"{self._directory}/{PENDING_FILE}"):
            self._check_pending(known)

    def _check_transaction_index(
        self,
        known: PartitionMetadata,
        base: int,
        transactional: dict[tuple[int, int], int],
    ) -> None:
        """Check that a segment's transaction index has the aborted transactions, and no others but
        those whose marker was lost.
        """
        path = f"{self._directory}/{file_name(base, TRANSACTION_INDEX_SUFFIX)}"
        try:
            with open(path, "rb") as file:
                entries = decode_transaction_index(file.read(), base)
        except FileNotFoundError:
            self._find(Severity.REPAIRABLE, path, "missing")
            return
        except TransactionIndexDamagedError as error:
            self._find(Severity.REPAIRABLE, path, f"damaged: {error}")
            return
        found = AbortedBatches(entries)
        lost = {each[:2] for each in entries if known.damage_at(each.marker_offset) is not None}
        for (producer_id, epoch), last_offset in transactional.items():
            control_type, marker_offset = self._markers.get((producer_id, epoch), (0, -1))
            if marker_offset >= 0 and last_offset > marker_offset:
                self._find(
                    Severity.DAMAGE,
                    path,
                    f"producer {producer_id} epoch {epoch} has batches behind its marker at "
                    f"offset {marker_offset}",
                    last_offset,
                )
            is_aborted = found.has(producer_id, epoch, last_offset)
            if is_aborted != (control_type == CONTROL_ABORT) and (producer_id, epoch) not in lost:
                self._find(
                    Severity.REPAIRABLE,
                    path,
                    f"says otherwise than the marker of producer {producer_id} epoch {epoch}",
                )

    def _check_pending(self, known: PartitionMetadata) -> None:
        """Check the bucket files of delayed records, and the damaged ones among them."""
        for name in sorted(os.listdir(self._directory)):
            if name.endswith(BUCKET_SUFFIX + DAMAGED_SUFFIX):
                self._find(
                    Severity.NOTE,
                    f"{self._directory}/{name}",
                    "quarantined earlier: the damaged part was not delivered",
                )
        try:
            manifest = self._manifest()
        except PendingDamagedError as error:
            self._find(
                Severity.DAMAGE,
                f"{self._directory}/{PENDING_FILE}",
                f"{error}: the pending records are unknown, and none of them is delivered",
            )
            return
        if manifest.topic_id != known.topic_id.hex():
            return  # of a deleted topic of this name
        for entry in manifest.files:
            try:
                self._check_bucket(entry)
            except (PendingDamagedError, FileNotFoundError) as error:
                if entry.number not in {now.number for now in self._manifest().files}:
                    continue  # a live scheduler has moved on meanwhile
                text = f"{error}: up to {entry.rows - entry.cancelled} delayed records are lost"
                self._find(Severity.DAMAGE, f"{self._directory}/{entry.file_name}", text)

    def _manifest(self) -> Manifest:
        with open(f"{self._directory}/{PENDING_FILE}", "rb") as file:
            return Manifest.decode(file.read())

    def _check_bucket(self, entry: BucketEntry) -> None:
        """Read the bucket files.

        Raises: PendingDamagedError, OSError.
        """
        with open(f"{self._directory}/{entry.file_name}", "rb", buffering=0) as file:
            fd = file.fileno()

            def read_at(length: int, position: int) -> bytes:
                return os.pread(fd, length, position)

            for chunk in walk_chunks(read_at, entry.begin, entry.end, entry.first_crc):
                proven(read_at, chunk)
                self._totals.pending_records += chunk.rows if chunk.kind == KIND_ROWS else 0
                self._totals.data_bytes += chunk.end - chunk.position
                self._advance(chunk.end - chunk.position)

    def _check_segment(self, known: PartitionMetadata, base: int, following: int | None) -> None:
        path = f"{self._directory}/{file_name(base)}"
        if not os.path.exists(path):
            path = f"{self._directory}/{file_name(base, OLD_SEGMENT_SUFFIX)}"
        totals = self._totals
        totals.segments += 1
        with open(path, "rb", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            totals.data_bytes += size

            def read_at(length: int, position: int) -> bytes:
                return os.pread(fd, length, position)

            start = schema_message_length(read_at)
            message = read_at(start, 0) if start else b""
            is_cleaned = _is_cleaned(message, known)
            if message not in known.schemas.values() and not is_cleaned:
                self._find(
                    Severity.REPAIRABLE,
                    path,
                    "its schema message is damaged; partition.json has it",
                )
                start = first_batch_position(read_at, size, known.seed, base) or len(
                    next(iter(known.schemas.values()))
                )
                is_cleaned = start not in {len(one) for one in known.schemas.values()}
            entries: list[IndexEntry] = []
            walk = Walk(start, base)
            reported = 0
            for position, header in self._walk(read_at, size, walk, known, base, path, following):
                self._check_batch(path, position, header)
                if not header.is_control and header.is_sparse != is_cleaned:
                    self._find(
                        Severity.DAMAGE,
                        path,
                        f"byte {position}: a batch {'without' if is_cleaned else 'with'} a column "
                        "of offsets, unlike the segment's schema",
                        header.base_offset,
                        header.last_offset,
                    )
                if header.is_transactional:
                    self._note_transactional(base, header)
                entries.append(
                    IndexEntry(
                        header.base_offset,
                        position,
                        max(
                            header.max_timestamp_us, entries[-1].max_timestamp_us if entries else 0
                        ),
                        header.batch_length,
                    )
                )
                totals.batches += 1
                totals.records += header.record_count
                if position - reported >= 1 << 24:
                    self._advance(position - reported)
                    reported = position
            self._advance(size - reported)
        self._check_index(base, entries)

    def _walk(
        self,
        read_at: Callable[[int, int], bytes],
        size: int,
        walk: Walk,
        known: PartitionMetadata,
        base: int,
        path: str,
        following: int | None,
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Yield every intact batch of the segment; report and skip the rest."""
        while True:
            for position, header in walk_batches(read_at, size, walk, known.seed):
                if following is not None and header.base_offset >= following:
                    return  # given up after a failed sync: the next segment has this batch
                yield position, header
            at, offset = walk.position, walk.next_offset
            if following is not None and offset >= following:
                return
            reported = any(d.segment_base == base and d.start == offset for d in known.damage)
            severity = Severity.NOTE if reported else Severity.DAMAGE
            if walk.ending is Ending.TORN:
                behind = find_behind(read_at, size, at, known.seed, offset)
                if behind is not None and (
                    following is not None or behind.proves_durable or behind.position < size
                ):
                    self._find(
                        severity, path, f"byte {at}: {walk.reason}", offset, behind.offset - 1
                    )
                    walk.position, walk.next_offset, walk.ending = (
                        behind.position,
                        behind.offset,
                        Ending.CLEAN,
                    )
                    if behind.position < size:
                        continue
                    return
            if following is not None:
                self._find(
                    severity,
                    path,
                    f"byte {at}: {walk.reason or 'the segment ends'} before its successor begins",
                    offset,
                    following - 1,
                )
            elif walk.ending is Ending.TORN:
                self._find(
                    Severity.REPAIRABLE,
                    path,
                    f"torn tail of {size - at} bytes at byte {at}: {walk.reason}",
                    offset,
                )
            return

    def _check_batch(self, path: str, position: int, header: BatchHeader) -> None:
        if header.append_time_us < self._append_us:
            self._find(
                Severity.DAMAGE,
                path,
                f"byte {position}: appended before the batch in front of it",
                header.base_offset,
                header.last_offset,
            )
        self._append_us = header.append_time_us
        if header.first_timestamp_us > header.max_timestamp_us:
            self._find(
                Severity.DAMAGE,
                path,
                f"byte {position}: first timestamp above the largest",
                header.base_offset,
                header.last_offset,
            )
        if header.is_sparse:
            self._sequences.clear()  # the batches that went on from there may be in it
        if header.producer_id == NO_PRODUCER or header.base_sequence < 0:
            return
        epoch, expected = self._sequences.get(
            header.producer_id, (header.producer_epoch, header.base_sequence)
        )
        newer = header.producer_epoch > epoch and header.base_sequence == 0
        if header.producer_epoch < epoch or (
            header.base_sequence != expected and not newer and header.base_sequence != 0
        ):
            self._find(
                Severity.DAMAGE,
                path,
                f"byte {position}: producer {header.producer_id} epoch {header.producer_epoch} "
                f"has sequence {header.base_sequence}, expected {expected}",
                header.base_offset,
                header.last_offset,
            )
        following = (header.base_sequence + header.last_offset_delta + 1) % SEQUENCE_MODULUS
        self._sequences[header.producer_id] = header.producer_epoch, following

    def _note_transactional(self, base: int, header: BatchHeader) -> None:
        key = header.producer_id, header.producer_epoch
        of_segment = self._transactional.setdefault(base, {})
        if header.is_marker:
            self._markers[key] = header.control_type, header.base_offset
            self._sequences.pop(header.producer_id, None)
        else:
            of_segment[key] = header.last_offset

    def _check_index(self, base: int, requested: list[IndexEntry]) -> None:
        path = f"{self._directory}/{file_name(base, INDEX_SUFFIX)}"
        if not os.path.exists(path):
            self._find(Severity.REPAIRABLE, path, "missing")
            return
        with open(path, "rb") as file:
            data = file.read()
        found = segment_index.decode(data, base)
        if found is None:
            self._find(Severity.REPAIRABLE, path, "damaged or incomplete")
        elif found[: len(requested)] != requested:
            self._find(
                Severity.REPAIRABLE,
                path,
                f"does not match the segment ({len(found)} entries, {len(requested)} batches)",
            )


def _is_cleaned(message: bytes, known: PartitionMetadata) -> bool:
    """True for the schema message of a cleaned segment of the partition."""
    from tailrace.format.record_batch.arrow_metadata import ArrowMetadataError, read_schema
    from tailrace.format.record_batch.sparse_layout import is_cleaned_schema

    for topic_message in known.schemas.values():
        try:
            if is_cleaned_schema(message, read_schema(topic_message)):
                return True
        except ArrowMetadataError:
            continue
    return False
