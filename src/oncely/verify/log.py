"""Event logs, parsed from their lines (docs/events.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from oncely.core.ranges import OffsetRange, TopicPartition, from_tree
from oncely.errors import WrongInput
from oncely.verify.report import Broken

_VERSION = 1
_SHOWN = 160  # characters of a line

Tree = dict[str, dict[int, int]]
Pair = tuple[int, int]


class _Line(msgspec.Struct, tag_field="type"):
    time: str
    pipeline: str
    run: str
    epoch: int | None


class _OfPartition(_Line):
    topic: str
    partition: int


class _OfGroup(_Line):
    partitions: dict[str, list[int]]


class Started(_Line, tag="started"):
    """A process has begun to append."""

    version: int
    cut: int = 0


class EventsLost(_Line, tag="events_lost"):
    """Events that could not be appended."""

    events: int
    cut: int = 0


class Opened(_Line, tag="opened"):
    """The run has taken over the ledger."""

    positions: Tree
    first_start: bool
    every_partition: bool = True
    beyond: dict[str, dict[int, list[Pair]]] = msgspec.field(default_factory=dict)
    begun: dict[str, list[int]] = {}


class Planned(_Line, tag="planned"):
    """The ranges of a batch."""

    batch: int
    ranges: dict[str, dict[int, Pair]]


class RangeCommitted(_OfPartition, tag="range_committed"):
    """A range has taken effect, now or earlier."""

    range: Pair
    kind: str
    replayed: bool
    records: int
    rows: int
    rejects: int
    filtered: int


class BatchCommitted(_Line, tag="batch_committed"):
    """All ranges of a batch have taken effect."""

    batch: int
    records: int
    rows: int
    rejects: int
    positions: Tree


class PartitionAdded(_OfPartition, tag="partition_added"):
    """A partition was added to the topic."""

    position: int


class GapFound(_OfPartition, tag="gap"):
    """Records were deleted before they were read."""

    range: Pair


class Reset(_Line, tag="reset"):
    """Positions were moved."""

    before: Tree
    positions: Tree


class Fenced(_Line, tag="fenced"):
    """A newer run has taken over."""

    by_epoch: int
    partitions: dict[str, list[int]] = {}


class Failed(_Line, tag="failed"):
    """A batch has failed and is repeated."""


class StandingBy(_Line, tag="standing_by"):
    """The run waits for its turn."""


class Draining(_Line, tag="draining"):
    """The run was asked to stop."""


class Closed(_Line, tag="closed"):
    """The run has ended."""


class Assigned(_OfGroup, tag="partitions_assigned"):
    """A group has assigned partitions."""


class Revoked(_OfGroup, tag="partitions_revoked"):
    """A group has revoked partitions."""


class Lost(_OfGroup, tag="partitions_lost"):
    """A group has given partitions to others."""


InEpoch = Planned | RangeCommitted | BatchCommitted | PartitionAdded | GapFound
"""Events of a takeover that was told before."""

Event = (
    InEpoch | Started | EventsLost | Opened | Reset | Fenced | StandingBy | Failed | Draining
    | Closed | Assigned | Revoked | Lost
)  # fmt: skip
_KINDS: Mapping[str, type[Event]] = {one.__struct_config__.tag: one for one in Event.__args__}


class Head(msgspec.Struct, frozen=True):
    """The part that all lines have; also those of types that a later version adds."""

    time: str
    pipeline: str
    run: str
    type: str


class Line(NamedTuple):
    """An event and its place."""

    place: str
    text: str
    event: Event

    def __str__(self) -> str:
        told = msgspec.json.decode(self.text, type=dict)
        time, epoch, run, kind = (told.pop(key) for key in ("time", "epoch", "run", "type"))
        told.pop("pipeline")
        said = " ".join(f"{key}={msgspec.json.encode(one).decode()}" for key, one in told.items())
        who = f"epoch {epoch} of run {run[:8]}" if epoch else f"run {run[:8]}"
        shown = f"{kind} {said}" if len(said) <= _SHOWN else f"{kind} {said[:_SHOWN]}…"
        return f"{self.place}: {time} {who}: {shown}"


@dataclass(frozen=True)
class Log:
    """The lines of all files of a pipeline.

    Attributes:
        lines: the events in the order of a file; those of several files in the order of time.
        problems: lines that no crash explains, and lines of other pipelines.
    """

    lines: Sequence[Line] = ()
    problems: Sequence[Broken] = ()


def read(paths: Sequence[Path], pipeline: str) -> Log:
    """Read event logs. A line that an earlier file contains, too, counts once.

    Raises:
        WrongInput: a file can't be read.
    """
    logs = []
    for path in paths:
        try:
            logs.append(parsed(path.read_bytes(), pipeline, str(path)))
        except OSError as error:
            raise WrongInput(f"the event log {path} can't be read: {error.strerror}") from None
    lines, files, known = list[Line](), 0, set[str]()
    for log in logs:
        new = [line for line in log.lines if line.text not in known]
        known |= {line.text for line in new}
        lines += new
        files += bool(new)
    if files > 1:
        lines.sort(key=attrgetter("event.time"))
    return Log(lines, [problem for log in logs for problem in log.problems])


def parsed(data: bytes, pipeline: str, name: str) -> Log:
    """A log from the content of its file."""
    lines: list[Line] = []
    problems: list[Broken] = []
    cut: list[tuple[str, bytes, str]] = []
    texts = data.split(b"\n")
    for number, text in enumerate(texts, 1):
        place, last = f"{name}:{number}", number == len(texts)
        if not text:
            continue
        found = _parse(text)
        if isinstance(found, str):
            if not last:
                cut.append((place, text, found))
            continue
        if cut and not (isinstance(found, Started | EventsLost) and found.cut == len(cut[-1][1])):
            problems += [_unreadable(*one) for one in cut]
        cut.clear()
        problem = _foreign(found, pipeline, place)
        if problem is not None:
            problems.append(problem)
        elif not isinstance(found, Head):
            lines.append(Line(place, text.decode(), found))
    problems += [_unreadable(*one) for one in cut]  # ended, and followed by nothing
    return Log(lines, problems)


def _parse(text: bytes) -> Event | Head | str:
    """The event, the head of one of an unknown type, or the reason why it is neither."""
    try:
        head = msgspec.json.decode(text, type=Head)
        kind = _KINDS.get(head.type)
        return head if kind is None else msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return str(error)


def _unreadable(place: str, text: bytes, why: str) -> Broken:
    shown = text[:_SHOWN].decode(errors="replace")
    return Broken(
        "log",
        f"{place} is no event ({why}), and no writer says that it was cut there",
        context=(shown,),
    )


def _foreign(found: Event | Head, pipeline: str, place: str) -> Broken | None:
    if found.pipeline != pipeline:
        text = f"{place} is an event of pipeline {found.pipeline!r}, not of {pipeline!r}"
        return Broken("log", text)
    if isinstance(found, Started) and found.version > _VERSION:
        text = f"{place}: format {found.version} of a newer version of Oncely"
        return Broken("log", text)
    return None


def at(event: _OfPartition) -> TopicPartition:
    """The topic-partition of an event."""
    return TopicPartition(event.topic, event.partition)


def positions(tree: Tree) -> dict[TopicPartition, int]:
    """The positions of an event."""
    return from_tree(tree)


def ranges(event: Planned) -> dict[TopicPartition, Pair]:
    """The ranges of a plan."""
    return from_tree(event.ranges)


def beyond(event: Opened) -> dict[TopicPartition, list[OffsetRange]]:
    """The ranges beyond the positions of a takeover; those that are ranges of offsets."""
    return {
        tp: [OffsetRange(*pair) for pair in pairs if 0 <= pair[0] <= pair[1]]
        for tp, pairs in from_tree(event.beyond).items()
    }


def numbers(tree: Mapping[str, Iterable[int]]) -> Iterator[TopicPartition]:
    """The partitions of an event."""
    for topic, own in tree.items():
        yield from (TopicPartition(topic, number) for number in own)


def shown(lines: Iterable[Any]) -> tuple[str, ...]:
    """Lines as context."""
    return tuple(str(one) for one in lines)
