"""The ledger topic: positions, epochs, resets and replays of one pipeline, in the order of the log.

The topic is compacted: the newest message of each key is always there, and older ones as long as
Kafka has not compacted their segment. So the history that is found here may be incomplete, and what
it does not contain is no sign of damage.

| key                                    | value                    |
|----------------------------------------|--------------------------|
| ``["pipeline", name]``                 | :class:`PipelineEntry`   |
| ``["position", name, topic, number]``  | :class:`PositionEntry`   |
| ``["reset", name, topic, number, n]``  | :class:`ResetEntry`      |
| ``["replayed", name, topic, number]``  | :class:`ReplayedEntry`   |
| ``["amended", name, topic, number]``   | :class:`StoredTotals`    |
| ``["rewritten", name, topic, number]`` | :class:`RewrittenEntry`  |

Beside it a rejects' topic has the rejected records, each with its origin in headers at the end. A
dead letter is never removed from that topic. It waits until the position of replays is behind it
(then its record has rows, was filtered, or has a newer dead letter), or until a reset makes the
pipeline read its record again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from oncely.audit.stored.log import Topics
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition, cut, grouped
from oncely.errors import OlderFormat, WrongInput
from oncely.kafka.records import headers_of


class StoredTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counts and digest of all ranges from an offset to a position, or their change by replays."""

    since: int
    begun: int = 0
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0
    digest: int | None = 0
    recipe: str = ""

    @property
    def counts(self) -> Counts:
        """The sums."""
        return Counts(
            self.records, self.rows, self.rejects, self.filtered, self.digest, self.recipe
        )


class PositionEntry(msgspec.Struct, frozen=True):
    """A position, and the range whose commit has moved it there.

    ``kind`` is data, hole, gap or joined as in every history, or ``taken``: a takeover or a reset
    set the position, and the range is empty.
    """

    position: int
    epoch: int
    cluster: str
    topic_id: str
    start: int
    end: int
    kind: str
    records: int
    rows: int
    rejects: int
    filtered: int
    mode: str
    totals: StoredTotals | None


class Counted(msgspec.Struct, frozen=True):
    """The pipeline's count of records and rejects, and the setting under which it was begun."""

    setting: str
    records: int
    rejects: int


class PipelineEntry(msgspec.Struct, frozen=True):
    """The pipeline: its newest epoch and run, cluster and topics, destination, start positions."""

    epoch: int
    run: str
    cluster: str
    topic_ids: dict[str, str]
    target: str
    pending: dict[str, dict[int, int]]
    settled: dict[str, list[int]]
    outputs: dict[str, str]
    resetting: dict[str, dict[int, int]]
    leaders: dict[str, dict[int, int]]
    counted: Counted
    whole: tuple[int, int] | None = None


class ResetEntry(msgspec.Struct, frozen=True):
    """The position to which a reset led, and the one before it, if it is stored."""

    position: int
    before: int | None = None


class ReplayedEntry(msgspec.Struct, frozen=True):
    """The next dead letter to be replayed, in the rejects' topic of that id."""

    position: int
    topic_id: str


class RewrittenEntry(msgspec.Struct, frozen=True):
    """The last repair or backfill; and start, end and epoch of all backfilled ranges."""

    kind: str
    start: int
    end: int
    epoch: int
    backfilled: list[tuple[int, int, int]]


_ADDED = (
    "outputs", "resetting", "leaders", "counted",
    "records", "rows", "rejects", "filtered", "mode", "totals", "backfilled",
)  # fmt: skip
"""Fields that versions before the first release did not write."""

_PARTITIONS = 16
"""The partitions of a ledger topic in which each pipeline has one."""

Entry = PositionEntry | PipelineEntry | ResetEntry | ReplayedEntry | StoredTotals | RewrittenEntry
_KINDS: Mapping[str, tuple[int, type[Entry]]] = {
    "pipeline": (2, PipelineEntry),
    "position": (4, PositionEntry),
    "reset": (5, ResetEntry),
    "replayed": (4, ReplayedEntry),
    "amended": (4, StoredTotals),
    "rewritten": (4, RewrittenEntry),
}


class LedgerMessage(NamedTuple):
    """A message of the pipeline.

    Attributes:
        offset: its offset in the ledger topic.
        at_ms: its timestamp, milliseconds since 1970.
        key: the parts of its key.
        entry: its value; None for a tombstone.
    """

    offset: int
    at_ms: int
    key: tuple[Any, ...]
    entry: Entry | None

    @property
    def partition(self) -> TopicPartition | None:
        """The topic-partition of the key; None for the pipeline's own message."""
        return TopicPartition(self.key[2], self.key[3]) if len(self.key) > 3 else None


@dataclass(frozen=True)
class TopicLedger:
    """What the ledger topic says of one pipeline.

    Attributes:
        messages: the pipeline's messages, ascending by offset.
        problems: offset and reason of messages that are invalid.
        foreign: the number of messages that belong to no pipeline.
        first, end: the offsets between which the topic was read, in the pipeline's partition.
    """

    messages: Sequence[LedgerMessage] = ()
    problems: Sequence[tuple[int, str]] = ()
    foreign: int = 0
    first: int = 0
    end: int = 0
    _newest: dict[tuple[Any, ...], Entry] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for one in self.messages:
            if one.entry is None:
                self._newest.pop(one.key, None)
            else:
                self._newest[one.key] = one.entry

    @property
    def pipeline(self) -> PipelineEntry | None:
        """The newest state of the pipeline; None if it never ran, or its message is invalid."""
        found = [one for one in self._newest.values() if isinstance(one, PipelineEntry)]
        return found[0] if found else None

    @property
    def positions(self) -> dict[TopicPartition, PositionEntry]:
        """The newest position of each partition."""
        return {tp: e for (tp, *_), e in self._of("position") if isinstance(e, PositionEntry)}

    @property
    def resets(self) -> dict[TopicPartition, dict[int, Position]]:
        """Per partition, the epoch of each reset and its position."""
        found: dict[TopicPartition, dict[int, Position]] = {}
        for (tp, *epoch), entry in self._of("reset"):
            if isinstance(entry, ResetEntry):
                found.setdefault(tp, {})[epoch[0]] = entry.position
        return found

    @property
    def skipped(self) -> dict[TopicPartition, list[OffsetRange]]:
        """The offsets that resets have passed over, and no later one has gone back to."""
        found: dict[TopicPartition, list[OffsetRange]] = {}
        resets = [(e[0], tp, one) for (tp, *e), one in self._of("reset")]
        for _, tp, one in sorted(resets, key=lambda it: it[:2]):
            if isinstance(one, ResetEntry):
                own = cut(found.get(tp, []), one.position)
                if one.before is not None and one.before < one.position:
                    own = [*own, OffsetRange(one.before, one.position)]
                found[tp] = own
        return found

    def undone(self, tp: TopicPartition, epoch: int, offset: int) -> bool:
        """True if a reset after an epoch makes the pipeline read an offset again."""
        return any(by > epoch and at <= offset for by, at in self.resets.get(tp, {}).items())

    @property
    def replayed(self) -> dict[TopicPartition, ReplayedEntry]:
        """The position of replays in each partition of a rejects' topic."""
        return {tp: e for (tp, *_), e in self._of("replayed") if isinstance(e, ReplayedEntry)}

    @property
    def amended(self) -> dict[TopicPartition, StoredTotals]:
        """The changes of totals by replays; void if they are of other totals."""
        return {tp: e for (tp, *_), e in self._of("amended") if isinstance(e, StoredTotals)}

    @property
    def rewritten(self) -> dict[TopicPartition, RewrittenEntry]:
        """The last rewrite of each partition."""
        return {tp: e for (tp, *_), e in self._of("rewritten") if isinstance(e, RewrittenEntry)}

    @property
    def source(self) -> SourceIdentity:
        """Cluster and topics that were read; empty if the pipeline never ran."""
        known = self.pipeline
        return SourceIdentity(known.cluster, known.topic_ids) if known else SourceIdentity("", {})

    def history(self, tp: TopicPartition) -> list[LedgerMessage]:
        """The positions of a partition that are still in the topic, ascending by offset."""
        return self._history.get(tp, [])

    @cached_property
    def _history(self) -> dict[TopicPartition, list[LedgerMessage]]:
        positions = (one for one in self.messages if one.key[0] == "position")
        return grouped((one.partition, one) for one in positions if one.partition is not None)

    def _of(self, kind: str) -> Iterator[tuple[tuple[Any, ...], Entry]]:
        for key, entry in self._newest.items():
            if key[0] == kind:
                yield (TopicPartition(key[2], key[3]), *key[4:]), entry


def read_ledger(topics: Topics, ledger_topic: str, pipeline: str) -> TopicLedger:
    """Everything that was in the pipeline's partition when it was called; waits for the
    transactions that are open there.

    The pipeline's records are in one of the first 16 partitions, by CRC-32 of its name.

    Raises:
        OlderFormat: a message lacks a field of :data:`_ADDED`.
        WrongInput: the topic has too few partitions.
        Unavailable: a transaction stayed open, or no answer.
    """
    ends = topics.ends(ledger_topic)
    if not ends:
        return TopicLedger()
    if len(ends) < _PARTITIONS:
        raise WrongInput(
            f"the ledger topic {ledger_topic!r} has {len(ends)} of {_PARTITIONS} partitions",
            way_out="check sink.ledger_topic; versions of Oncely before 0.1.0 have made it with one"
            " (docs/worker.md)",
        )
    here = TopicPartition(ledger_topic, zlib.crc32(pipeline.encode()) % _PARTITIONS)
    return parsed(topics.read({here: ends[here].high}), pipeline, ends[here].first, ends[here].high)


def parsed(messages: Iterable[Any], pipeline: str, first: int = 0, end: int = 0) -> TopicLedger:
    """The ledger of a pipeline from messages of confluent-kafka, in the order of the log.

    Raises:
        OlderFormat: see :func:`read_ledger`.
    """
    ours: list[LedgerMessage] = []
    problems: list[tuple[int, str]] = []
    foreign = 0
    for message in messages:
        offset, key = message.offset(), _key(message.key())
        if key is None:
            foreign += 1
        elif key[1] == pipeline:
            try:
                entry = _entry(key, message.value())
            except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
                if any(f"missing required field `{name}`" in str(error) for name in _ADDED):
                    raise OlderFormat(f"the ledger topic's message {list(key)}") from None
                problems.append((offset, f"{list(key)}: {error}"))
            else:
                ours.append(LedgerMessage(offset, message.timestamp()[1], key, entry))
    return TopicLedger(ours, problems, foreign, first, end)


def _key(key: bytes | None) -> tuple[Any, ...] | None:
    """The parts of a key; None if it is no key of a ledger."""
    try:
        found = msgspec.json.decode(key or b"")
    except msgspec.DecodeError:
        return None
    match found:
        case [str(), str(), *_]:
            return tuple(found)
    return None


def _entry(key: tuple[Any, ...], value: bytes | None) -> Entry | None:
    if key[0] not in _KINDS:
        raise ValueError("an unknown kind")
    length, kind = _KINDS[key[0]]
    types = (str, str, str, int, int)[:length]
    if len(key) != length or not all(map(isinstance, key, types)):
        raise ValueError("another form of key")
    return None if value is None else msgspec.json.decode(value, type=kind)


# -- dead letters ---------------------------------------------------------------------------


class Letter(NamedTuple):
    """A dead letter as it is stored.

    Attributes:
        content: a digest of each of the record's parts, so that the dead letters of a whole topic
            fit into memory.
    """

    of: TopicPartition
    offset: int
    stage: str
    reason: str
    content: tuple[bytes, ...]


def content_of(timestamp: object, key: object, value: object, headers: Any) -> tuple[bytes, ...]:
    """The content of a record; headers are pairs, or a text of them as databases store it."""
    if not isinstance(headers, str):
        headers = json.dumps(
            [
                (name, None if v is None else base64.b64encode(v).decode())
                for name, v in headers or ()
            ]
        )
    parts = (timestamp, key, value, headers)
    return tuple(hashlib.blake2b(repr(one).encode(), digest_size=16).digest() for one in parts)


_FIRST = "oncely.pipeline"


@dataclass(frozen=True)
class StoredLetter:
    """A dead letter of one pipeline.

    Attributes:
        of: topic-partition of the rejected record.
        offset: its offset.
        epoch: the run that rejected it.
        stage, reason: why.
        at: the dead letter's own topic-partition and offset.
        waits: True unless it was replayed, or a reset has made it void.
        content: as of :class:`Letter`; None if parts of the record were left out.
    """

    of: TopicPartition
    offset: int
    epoch: int
    stage: str
    reason: str
    at: tuple[TopicPartition, int]
    waits: bool = True
    content: tuple[bytes, ...] | None = None

    @property
    def kept(self) -> Letter | None:
        """Its content; None if it is not complete, or does not wait."""
        if self.content is None or not self.waits:
            return None
        return Letter(self.of, self.offset, self.stage, self.reason, self.content)


def read_letters(
    topics: Topics, rejects_topic: str, pipeline: str, ledger: TopicLedger
) -> Iterator[StoredLetter]:
    """The dead letters of a pipeline; those of other pipelines in the topic are left out.

    Args:
        topics: the cluster.
        rejects_topic: the topic; it may be missing.
        pipeline: the pipeline's name.
        ledger: tells which dead letters wait. Read before, it may take replayed ones for waiting.

    Raises:
        Unavailable: a transaction stayed open, or no answer.
    """
    topic_id, ends = topics.topic_id(rejects_topic), topics.ends(rejects_topic)
    replayed = {tp: one.position for tp, one in ledger.replayed.items() if one.topic_id == topic_id}
    for message in topics.read({tp: one.high for tp, one in ends.items()}):
        found = letter(message, pipeline, replayed, ledger)
        if found is not None:
            yield found


def letter(
    message: Any, pipeline: str, replayed: Mapping[TopicPartition, int], ledger: TopicLedger
) -> StoredLetter | None:
    """A message of confluent-kafka as a dead letter; None if it is no dead letter of the pipeline.

    Args:
        replayed: the positions of replays in the rejects' topic.
    """
    headers = headers_of(message)
    at = max((i for i, (name, _) in enumerate(headers) if name == _FIRST), default=None)
    if at is None or headers[at][1] != pipeline.encode():
        return None
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[at:]}
    try:
        of = TopicPartition(own["oncely.topic"], int(own["oncely.partition"]))
        offset, epoch = int(own["oncely.offset"]), int(own["oncely.epoch"])
        when = own.get("oncely.timestamp_ms")
        at_ms = int(when) if when else None
    except (KeyError, ValueError):  # written by another program
        return None
    here, number = TopicPartition(message.topic(), message.partition()), message.offset()
    waits = number >= replayed.get(here, 0) and not ledger.undone(of, epoch, offset)
    stage, reason = own.get("oncely.stage", ""), own.get("oncely.reason", "")
    content = None
    if "oncely.left_out" not in own:
        content = content_of(at_ms, message.key(), message.value(), headers[:at])
    return StoredLetter(of, offset, epoch, stage, reason, (here, number), waits, content)
