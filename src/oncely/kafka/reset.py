"""New positions of a reset: the verbs of ``kafka-consumer-groups --reset-offsets``.

As in Kafka's tool (KIP-122), a position outside the log is moved to its nearest end, with a note.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import WrongInput
from oncely.kafka.source import KafkaSource
from oncely.kafka.start import parse_moment

VERBS = {
    "to-earliest": "to the first record",
    "to-latest": "to the end",
    "to-offset": "to an offset",
    "to-datetime": "to a time (ISO 8601)",
    "shift-by": "by a number of offsets",
    "by-duration": "back by a duration (PT1H30M)",
}
"""The verbs of ``oncely offsets reset``, and their meanings."""

VerbName = Literal[
    "to-earliest", "to-latest", "to-offset", "to-datetime", "shift-by", "by-duration"
]


@dataclass(frozen=True)
class Verb:
    """A kind of reset, and its argument.

    Attributes:
        name: ``to-earliest``: the first offset that is still in the topic. ``to-latest``: the last
            stable offset. ``to-offset``: the same offset in every partition. ``to-datetime``: the
            first record at or after a time; the end if there is none. ``shift-by``: forward by a
            number of offsets, or backward if it is negative. ``by-duration``: the first record that
            is at most this old.
        argument: the offset, the time in ms since 1970, the number of offsets, or the duration in
            ms; 0 for a verb without an argument.
    """

    name: VerbName
    argument: int


@dataclass(frozen=True)
class ResetPlan:
    """The effect of a reset; nothing is written yet.

    Attributes:
        positions: the new position of every partition.
        notes: one sentence for each position that had to be moved into the log.
    """

    positions: Mapping[TopicPartition, Position]
    notes: tuple[str, ...] = ()


def plan_reset(
    verb: Verb,
    current: Mapping[TopicPartition, Position],
    earliest: Mapping[TopicPartition, Position],
    end: Mapping[TopicPartition, Position],
    source: KafkaSource,
    *,
    now_ms: int | None = None,
) -> ResetPlan:
    """Plan new positions for every partition that the topics have.

    Args:
        verb: the kind of reset.
        current: the ledger's positions.
        earliest: the first offset of each partition.
        end: the last stable offset of each partition.
        source: used only if the verb refers to a time.
        now_ms: the present, in ms since 1970, for ``by-duration``; the clock by default.

    Raises:
        WrongInput: ``shift-by`` for a partition that has no position yet.
    """
    wanted = _wanted(verb, current, earliest, end, source, now_ms)
    positions: dict[TopicPartition, Position] = {}
    notes: list[str] = []
    for tp in sorted(earliest.keys() & end.keys()):
        low, high = earliest[tp], max(earliest[tp], end[tp])
        positions[tp] = min(max(wanted[tp], low), high)
        if wanted[tp] < low:
            notes.append(f"{tp}: {wanted[tp]} is before the first offset, {low}; set to {low}")
        elif wanted[tp] > high:
            notes.append(f"{tp}: {wanted[tp]} is beyond the end, {high}; set to {high}")
    return ResetPlan(positions, tuple(notes))


def _wanted(
    verb: Verb,
    current: Mapping[TopicPartition, Position],
    earliest: Mapping[TopicPartition, Position],
    end: Mapping[TopicPartition, Position],
    source: KafkaSource,
    now_ms: int | None,
) -> Mapping[TopicPartition, int]:
    """The verb's position for every partition, inside the log or not."""
    match verb.name:
        case "to-earliest":
            return earliest
        case "to-latest":
            return end
        case "to-offset":
            return dict.fromkeys(earliest, verb.argument)
        case "shift-by":
            return {tp: _position(current, tp) + verb.argument for tp in earliest}
        case "to-datetime":
            return _at(verb.argument, end, source)
        case "by-duration":
            now_ms = int(time.time() * 1000) if now_ms is None else now_ms
            return _at(now_ms - verb.argument, end, source)


def _at(
    timestamp_ms: int, end: Mapping[TopicPartition, Position], source: KafkaSource
) -> Mapping[TopicPartition, int]:
    # A partition that was created after the ends were read has no older records.
    return {**end, **source.offsets_at(timestamp_ms)}


def _position(current: Mapping[TopicPartition, Position], tp: TopicPartition) -> Position:
    if tp not in current:
        raise WrongInput(
            f"--shift-by: {tp} has no position yet",
            way_out="use --to-earliest, --to-latest, --to-offset or --to-datetime",
        )
    return current[tp]


def verb_of(name: str, value: str) -> Verb:
    """The verb of a name and its argument, which is ignored if the verb has none.

    Raises:
        WrongInput: there is no such verb, or its argument is invalid.
    """
    match name:
        case "to-earliest" | "to-latest":
            return Verb(name, 0)
        case "to-offset" | "shift-by":
            return Verb(name, _whole(name, value))
        case "to-datetime":
            return Verb(name, parse_time(value))
        case "by-duration":
            return Verb(name, parse_duration(value))
    raise WrongInput(f"{name!r} is no kind of reset", way_out=", ".join(VERBS))


def _whole(name: VerbName, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise WrongInput(
            f"{value!r} is no whole number", way_out=f"{VERBS[name]}: a whole number"
        ) from None


def parse_time(text: str) -> int:
    """Parse the argument of ``--to-datetime``: ISO 8601, UTC if it has no offset; to ms since
    1970.

    Raises:
        WrongInput: not a time.
    """
    try:
        return parse_moment(text).timestamp_ms
    except ValueError:
        raise WrongInput(
            f"--to-datetime: found {text!r}; allowed: an ISO 8601 time",
            way_out="write it as 2024-05-31T18:00:00 (UTC) or 2024-05-31T18:00:00+02:00",
        ) from None


_DURATION = re.compile(
    r"(?P<sign>[+-])?P(?:(?P<days>[+-]?\d+)D)?"
    r"(?:T(?=[+\-\d])(?:(?P<hours>[+-]?\d+)H)?(?:(?P<minutes>[+-]?\d+)M)?"
    r"(?:(?P<seconds>[+-]?\d+)(?:[.,](?P<fraction>\d{0,9}))?S)?)?",
    re.IGNORECASE,
)


def parse_duration(text: str) -> int:
    """Parse the argument of ``--by-duration``: ``PnDTnHnMnS``, as ``java.time.Duration`` does;
    to ms.

    Raises:
        WrongInput: not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or text.strip().upper().endswith("P"):
        raise WrongInput(
            f"--by-duration: found {text!r}; allowed: an ISO 8601 duration, PnDTnHnMnS",
            way_out="write P7D for seven days, PT1H30M for an hour and a half",
        )
    days, hours, minutes, seconds = (
        int(match[part] or 0) for part in ("days", "hours", "minutes", "seconds")
    )
    fraction_ms = int((match["fraction"] or "").ljust(3, "0")[:3])
    if (match["seconds"] or "").startswith("-"):
        fraction_ms = -fraction_ms
    total = ((days * 24 + hours) * 60 + minutes) * 60_000 + seconds * 1000 + fraction_ms
    return -total if match["sign"] == "-" else total
