"""The range of offsets that a command reads: where it begins and ends, as its options say."""

from __future__ import annotations

import datetime as dt

import click

from appliance.cli.output import complain
from tailrace.consumer.consumer import Consumer
from tailrace.core.topic_partition import TopicPartition


class Start:
    """The start of reading: one of the ways that the options name, else the current end."""

    def __init__(
        self,
        from_beginning: bool,
        offset: int | None,
        since: dt.datetime | None,
        tail: int | None,
        *,
        is_past: bool,
    ) -> None:
        """`is_past`: an end is given, so that reading starts at the beginning by default. Raises
        UsageError.
        """
        self._offset, self._since, self._tail = offset, since, tail
        given = [from_beginning, offset is not None, since is not None, tail is not None]
        if sum(given) > 1:
            raise click.UsageError(
                "--from-beginning, --offset, --since and --tail exclude each other: give one "
                "of them"
            )
        self._from_beginning = from_beginning or (is_past and not any(given))
        self.is_given = any(given) or is_past

    def seek(self, consumer: Consumer, keys: list[TopicPartition]) -> None:
        """Raises ClickException when the offset is behind the end of every partition."""
        ends = consumer.end_offsets(keys)
        if self._from_beginning:
            consumer.seek_to_beginning(*keys)
        elif self._offset is not None:
            beyond = [key for key in keys if ends[key] < self._offset]
            for key in beyond:
                sentence = (
                    f"{key.topic}-{key.partition} ends at offset {ends[key]} and has no offset "
                    f"{self._offset}: give an offset below its end"
                )
                if len(beyond) == len(keys):
                    raise click.ClickException(
                        f"{sentence}. Begin between {consumer.beginning_offsets([key])[key]} and "
                        f"{ends[key]}, or with --tail N"
                    )
                complain(sentence)
            for key in keys:
                consumer.seek(key, min(self._offset, ends[key]))
        elif self._since is not None:
            for key, found in consumer.offsets_for_times(dict.fromkeys(keys, self._since)).items():
                consumer.seek(key, ends[key] if found is None else found.offset)
        elif self._tail is not None:
            begins = consumer.beginning_offsets(keys)
            for key in keys:
                consumer.seek(key, max(begins[key], ends[key] - self._tail))
        else:
            for key in keys:
                consumer.seek(key, ends[key])


def ends_of(
    consumer: Consumer,
    keys: list[TopicPartition],
    start: Start,
    until: dt.datetime | None,
    follow: bool,
) -> dict[TopicPartition, int] | None:
    """The offsets at which reading ends; None if it does not end."""
    if follow or not start.is_given:
        return None
    ends = consumer.end_offsets(keys)
    if until is None:
        return ends
    behind = consumer.offsets_for_times(dict.fromkeys(keys, until))
    return {
        key: end if (found := behind[key]) is None else found.offset for key, end in ends.items()
    }
