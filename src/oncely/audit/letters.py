"""Dead letters compared with their records in the topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, get_args

from oncely.audit.evidence import Log
from oncely.audit.stored.dead_letters import Letter, content_of
from oncely.core.batch import DISCARDED, Rejection, Stage
from oncely.core.expected import Expected
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kafka.records import LATEST_MS, headers_of, timestamp_of

_PARTS = ("timestamp", "key", "value", "headers")
_STAGES = {*get_args(Stage), DISCARDED}
_AT_ONCE = 500  # records that are in memory together
_COMPARED = 200  # characters of a reason: destinations shorten it


_NOTHING = content_of(None, None, None, ())


def compare_letters(
    letters: Iterable[Letter],
    ranges: Mapping[TopicPartition, OffsetRange],
    log: Log,
    expected: Expected | None,
) -> Iterator[tuple[Letter, str | None]]:
    """The dead letters of some offsets, and what is wrong with each: empty if nothing is, None if
    the topic no longer holds its record.

    Args:
        letters: by partition and offset.
        ranges: the offsets.
        log: the topics.
        expected: tells the stage at which a record is refused today; None if nothing does.
    """
    for tp, own in groupby(letters, lambda one: one.of):
        inside = [one for one in own if tp in ranges and one.offset in ranges[tp]]
        for at in range(0, len(inside), _AT_ONCE):
            some = inside[at : at + _AT_ONCE]
            found = log.messages(tp, [one.offset for one in some])
            refused = expected.refused(tp, list(found.values())) if expected and found else {}
            for one in some:
                there = one.offset in found
                yield one, _problem(one, found[one.offset], refused) if there else None


def _problem(letter: Letter, record: Any, refused: Mapping[int, Rejection]) -> str:
    at = timestamp_of(record)
    at = None if at is None or abs(at) > LATEST_MS else at
    wanted = content_of(at, record.key(), record.value(), headers_of(record))
    if letter.stage == DISCARDED:
        wanted = (wanted[0], *_NOTHING[1:])
    parts = zip(_PARTS, letter.content, wanted, strict=True)
    if other := [name for name, kept, own in parts if kept != own]:
        return f"its dead letter has another {' and '.join(other)}"
    today = refused.get(letter.offset)
    # Another reason is that of the destination, or of an earlier decode or transform.
    same = today is not None and letter.reason.startswith(today.reason[:_COMPARED])
    known = {today.stage, DISCARDED} if today is not None and same else _STAGES
    return "" if letter.stage in known else f"its dead letter has another stage: {letter.stage}"
