"""Transactions into topics: the publication of a batch, dead letters, and their replays.

In a batch commit the driver publishes a batch in one transaction. Messages, dead letters, ledger
records and offsets of all topic-partitions take effect together, by the publisher's transactional
id. In a run of batch commit that id moves every position, also over holes (docs/decisions/0012), so
init, read, write, commit is a compare-and-set of all of them at once.

The transaction must end before ``sink.transaction_timeout``, or the broker aborts it. All messages
are made before it begins, and the duration of the tasks does not count.

A replay writes what dead letters in a topic make today into a destination of the same cluster. A
dead letter stays in its topic; the token is the position of replays in that topic. One transaction
contains the records of valid dead letters, new dead letters for those that fail again, and the
position after all of them. The position has one transactional id, and so the order is that of every
position in Kafka (docs/decisions/0010): the result of processing is written by an instance that was
initialised first and then read the same position as before the processing. So a crash before the
commit leaves every dead letter in place, a crash after it none of them; a commit whose answer was
lost is settled by reading again; and of two concurrent replays the one that has initialised last
commits, the other one reads a moved position.

A reset voids dead letters, so the comparison includes resets, too. A reset initialises the id of
replays between the transaction that voids them and the first position that it moves. A replay that
has read no reset thus commits before that, as if it had run before the reset, or is fenced.

The pipeline itself may run at the same time: it appends dead letters, and its positions are not
touched.

A dead letter is a message. Key, value and headers are those of the record. Oncely's data are in
additional headers at the end, whose names begin with ``oncely.``, and ``oncely.pipeline`` is the
first of these: a record that was a dead letter before may contain such headers of its own. Behind
them are the headers by which other tools show dead letters, and send them to their topic again;
Oncely does not read them.

A message cannot be removed from a topic. Replayed dead letters are recorded by a position in each
of the topic's partitions, stored like the pipeline's own positions (docs/decisions/0013): in the
ledger topic, and as an offset of a separate group, which is the fast copy and may expire. The dead
letters from the positions on are waiting, except those of records that a reset has made the
pipeline read again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from confluent_kafka.admin import OffsetSpec

from oncely.core.batch import Batch, Reject, Rejection, StagedRowsGone
from oncely.core.change import Containing, LockedDeadLetters, ReplayResult, Reprocessed
from oncely.core.claim import Amendment, Claim, Fence, PositionMoved
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import InvariantViolation, Unavailable, check
from oncely.kafka import topics
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import KafkaRecord, each
from oncely.kafka.sender import Sender, batch_size
from oncely.kafka.transaction import Message, Transaction
from oncely.stores.document import add_amendment, covered_by
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.compare_and_set import compare_and_set, moving, write_positions
from oncely.stores.topic.ledger import TopicLedger
from oncely.stores.topic.records import (
    OffsetMetadata,
    PipelineRecord,
    ReplayRecord,
    View,
    replay_group,
    stamp,
)
from oncely.stores.topic.records import encode as ledger_value
from oncely.stores.topic.takeover import refuse_foreign, same_target

# Upper bound of a publication's memory in librdkafka, for any size.
_QUEUE = {"queue.buffering.max.messages": 200_000, "queue.buffering.max.kbytes": 65_536}


Sizes = Callable[[Sequence[str]], Mapping[str, int]]
"""Names of topics to ``max.message.bytes``."""

InTime = Callable[[], float]
"""The remaining seconds of the transaction.

Raises:
    Unavailable: no time is left.
"""


class Load(ABC):
    """The messages of a publication besides dead letters and positions."""

    @abstractmethod
    def topics(self, batch: Batch) -> list[str]:
        """The topics to which :meth:`send` will write."""

    def ready(self) -> None:  # noqa: B027 - nothing to check by default
        """Called when the transactional id is initialised, before the transaction begins.

        State that only transactions of this id change is constant from here to our own commit.

        Raises:
            StagedRowsGone: the staged output does not fit any more.
        """

    @abstractmethod
    def send(self, writer: Sender, batch: Batch, in_time: InTime) -> None:
        """Send the messages; ``in_time`` is called repeatedly."""

    def fresh(self) -> None:  # noqa: B027 - nothing to check by default
        """Called when the broker has all messages, so its clock runs; the commit is next.

        Raises:
            StagedRowsGone: the staged output is too old to be published.
        """


@dataclass(frozen=True)
class Publisher:
    """Publishes for one sink.

    Attributes:
        cluster: the open clients.
        load: the messages.
        rejects_topic: the topic of dead letters.
        largest: returns the topics' ``max.message.bytes``.
    """

    cluster: Cluster
    load: Load
    rejects_topic: str
    largest: Sizes

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Publish in one transaction; without a claim without a transaction, and without positions.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: the outcome is unknown, or it took too long; read the ledger and decide
                again.
        """
        rejects = [self.rejects_topic] if batch.rejects else []
        sizes = self.largest([*rejects, *self.load.topics(batch)])
        if claim is None:
            with self.cluster.plain(sizes.values()) as plain:
                self.load.fresh()
                self._send(plain, batch, fence, sizes, lambda: 0.0)
                plain.finish()
            return
        check(claim.query is None, "Kafka keeps no batch id of a query that brings its checkpoint")
        claim, counts = claim.data, batch.history
        if not claim.ranges:
            empty = not batch.rejects and not batch.rows
            check(empty, "rows without a range: no position covers them")
            return
        with moving(self.cluster, "batch", claim, sizes.values(), _QUEUE) as move:
            writer = move.writer
            self.load.ready()
            with self._in_time() as in_time:
                writer.begin()
                self._send(writer, batch, fence, sizes, in_time)
                # Last: until the commit they hide later messages in the ledger topic from others.
                write_positions(self.cluster, move, claim, counts)
                writer.flush(in_time())
                self.load.fresh()
                in_time()
            writer.commit()

    def _send(
        self,
        writer: Sender,
        batch: Batch,
        fence: Fence,
        sizes: Mapping[str, int],
        in_time: InTime,
    ) -> None:
        self.load.send(writer, batch, in_time)
        if batch.rejects:
            limit = sizes[self.rejects_topic]
            writer.send(self.rejects_topic, dead_letters(batch.rejects, limit, fence))

    @contextmanager
    def _in_time(self) -> Iterator[InTime]:
        """Returns the remaining seconds, and explains errors that are caused by the timeout."""
        begun, allowed = monotonic(), self.cluster.pipeline_topics.transaction_timeout

        def left() -> float:
            if (now := begun + allowed - monotonic()) <= 0:
                raise Unavailable("too late")
            return now

        try:
            yield left
        except StagedRowsGone:
            raise
        except Unavailable as error:
            took = monotonic() - begun
            if took < allowed:
                raise
            raise Unavailable(
                f"publishing took {took:.0f} s and was not done, longer than the"
                f" {allowed:g} s after which the broker aborts a transaction; nothing was"
                f" published ({error.message})",
                way_out="raise sink.transaction_timeout (up to the broker's"
                " transaction.max.timeout.ms), or lower spark.max_records_per_batch",
            ) from error


# -- replays of dead letters -----------------------------------------------------------------


_BYTES = 32 << 20  # bytes of dead letters in one transaction


@dataclass(frozen=True)
class ReplayOutput:
    """The output for dead letters that were processed again.

    Attributes:
        topics: the topics of the messages.
        refused: records that cannot be written.
        messages: returns the messages by topic; called when the id is initialised and the
            transaction has begun, and is empty. Raises Unavailable if the output is outdated; the
            records are processed again.
        fresh: called when the broker has the messages; the commit is next. Raises Unavailable if
            the output is too old; the records are processed again.
        changes: returns the amendments of ranges.
    """

    topics: Sequence[str] = ()
    refused: Sequence[Rejection] = ()
    messages: Callable[[], Mapping[str, Sequence[Message]]] = dict
    fresh: Callable[[], None] = lambda: None
    changes: Callable[[Containing], Sequence[Amendment]] = lambda _: ()


class TopicReplay:
    """A replay of the dead letters that are visible to a reader of committed records when it
    begins.

    Args:
        ledger: the ledger of the sink, in the same transactions.
        rejects: the topic of the dead letters.
        replayer: the transactional id of the pipeline's replays.
        write: creates the output of processed rows. Raises Stopped for a row of a Spark transform
            that cannot be written, and ConfigError if records would be written to a compacted
            topic.
        close: closes the sink.
    """

    def __init__(
        self,
        ledger: TopicLedger,
        rejects: str,
        replayer: str,
        write: Callable[[Reprocessed], ReplayOutput],
        close: Callable[[], None],
    ) -> None:
        self._target, self._rejects, self._replayer = ledger.target, rejects, replayer
        self._judged, self._close = write, close
        self._cluster = Cluster(replaying(ledger.pipeline_topics))
        self._letters = DeadLetterTopic(self._cluster, rejects)
        self._ends: Mapping[TopicPartition, Position] | None = None
        self._settled = False

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()
        self._close()

    @contextmanager
    def portion(self, limit: int) -> Iterator[LockedDeadLetters | None]:
        """The next dead letters, read and not locked: the transaction compares the position of
        replays."""
        if self._ends is None:
            self._ends = self._letters.ends()
        self._settle()
        position = self._letters.position(certain=True)
        taken = None if position is None else self._read(position, self._ends, limit)
        if taken is None or taken.after == taken.position.positions:
            yield None
        else:
            yield LockedDeadLetters(
                [one.reject for one in taken.whole], partial(self._commit, taken)
            )

    def _settle(self) -> None:
        """End a transaction that an earlier replay may have left open: it hides the position."""
        if not self._settled:
            with self._cluster.transaction(self._replayer) as before:
                before.init()
            self._settled = True

    def _read(
        self, position: ReplayPosition, ends: Mapping[TopicPartition, Position], limit: int
    ) -> _Taken:
        pipeline = self._cluster.pipeline_topics.pipeline
        same_target(_registered(position), self._target, pipeline)
        found: dict[tuple[TopicPartition, int], DeadLetter] = {}
        size = 0
        reading = DeadLetterReader(self._cluster.pipeline_topics, position, ends)
        with closing(reading.letters()) as waiting:
            for one in waiting:
                found[one.origin] = one  # a record has one dead letter; a copy changes nothing
                size += len(one.reject.key or b"") + len(one.reject.value or b"")
                if len(found) >= limit or size >= _BYTES:
                    break
        ordered = tuple(found[origin] for origin in sorted(found))
        return _Taken(position, ordered, dict(reading.positions))

    def _commit(self, taken: _Taken, judged: Reprocessed | None) -> ReplayResult:
        passed = ReplayOutput() if judged is None else self._judged(judged)
        again = [] if judged is None else [judged.again(one) for one in sorted(passed.refused)]
        kept = taken.kept(again)
        self._write(taken, passed, kept)
        return ReplayResult(len(taken.letters) - len(kept), len(kept))

    def _write(self, taken: _Taken, passed: ReplayOutput, kept: Sequence[DeadLetter]) -> None:
        """Write in a transaction: initialise first, then read the position."""
        rejects, pipeline_topics = self._rejects, self._cluster.pipeline_topics
        sizes = topics.largest_batch(self._cluster.admin, [*passed.topics, rejects])

        def compare() -> None:
            now = self._letters.position(certain=True)
            if now is None or now.compared != taken.position.compared:
                raise PositionMoved(rejects)  # another replay was faster: these are done

        self._settled = False
        with compare_and_set(self._cluster, self._replayer, compare, sizes.values()) as (writer, _):
            writer.begin()
            for topic, own in passed.messages().items():
                writer.send(topic, own)
            writer.send(
                rejects, [again(one, sizes[rejects], pipeline_topics.pipeline) for one in kept]
            )
            self._move(writer, taken)
            self._amend(writer, taken.position.view, passed)
            writer.flush(pipeline_topics.transaction_timeout)
            passed.fresh()
            writer.commit()
        self._settled = True

    def _amend(self, writer: Transaction, view: View, passed: ReplayOutput) -> None:
        """Write the changes of the positions' totals; only replays write these records."""
        keys, totals = self._cluster.keys, view.totals
        covered = covered_by(totals)
        changed = {
            tp: add_amendment(view.amended.get(tp), totals[tp], change)
            for tp, change in covered.changes(passed.changes(covered)).items()
        }
        records = [Message(ledger_value(one), keys.amended_key(tp)) for tp, one in changed.items()]
        writer.send(self._cluster.pipeline_topics.ledger_topic, records)

    def _move(self, writer: Transaction, taken: _Taken) -> None:
        """Write both copies of the new positions."""
        pipeline_topics, topic_id = self._cluster.pipeline_topics, taken.position.topic_id
        registered = _registered(taken.position)
        records, offsets = [], {}
        for tp, at in taken.after.items():
            value = ledger_value(ReplayRecord(at, topic_id))
            records.append(Message(value, pipeline_topics.keys.replayed_key(tp)))
            about = OffsetMetadata(at, registered.epoch, registered.cluster, topic_id)
            offsets[tp] = at, stamp(about, pipeline_topics.pipeline)
        writer.send(pipeline_topics.ledger_topic, records)
        writer.send_offsets(offsets, self._cluster.group_metadata())


@dataclass(frozen=True)
class _Taken:
    """Dead letters of one transaction, by their origins; the old and new position of replays."""

    position: ReplayPosition
    letters: tuple[DeadLetter, ...]
    after: Mapping[TopicPartition, Position]

    @property
    def whole(self) -> list[DeadLetter]:
        """Dead letters that can be replayed; the truncated ones stay."""
        return [one for one in self.letters if one.left_out is None]

    def kept(self, refused: Sequence[Reject]) -> list[DeadLetter]:
        """The dead letters that stay if some of the complete ones are refused again."""
        by_origin = {one.origin: one for one in self.whole}
        again = [replace(by_origin[one.partition, one.offset], reject=one) for one in refused]
        return [*again, *(one for one in self.letters if one.left_out is not None)]


def _registered(position: ReplayPosition) -> PipelineRecord:
    if position.view.pipeline is None:
        raise InvariantViolation("letters of a pipeline that is not in the ledger")
    return position.view.pipeline


# -- dead letters ---------------------------------------------------------------------------

_FIRST = "oncely.pipeline"
_LONGEST = 2000  # characters of a reason


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter that was read from the topic.

    Attributes:
        reject: the record and the reason.
        epoch: the epoch of the run that read the record.
        left_out: the parts that were omitted because of their size; None: the dead letter is
            complete.
    """

    reject: Reject
    epoch: int
    left_out: str | None = None

    @property
    def origin(self) -> tuple[TopicPartition, int]:
        """Topic-partition and offset of the record."""
        return self.reject.partition, self.reject.offset

    @property
    def shown(self) -> Reject:
        """The reject for display: its reason mentions omitted parts."""
        if self.left_out is None:
            return self.reject
        return replace(self.reject, reason=f"{self.reject.reason} ({self.left_out})")


def dead_letter(reject: Reject, limit: int, fence: Fence) -> Message:
    """The message for the rejects' topic.

    For a record that is too large even for that topic the headers for other tools are left out; if
    that is not sufficient the reason is shortened; then it is stored without its value, then
    without its key and headers: its offset identifies it, and the omitted parts are noted.

    Args:
        reject: the record.
        limit: the topic's ``max.message.bytes``.
        fence: the pipeline and the epoch of the run that read it.
    """
    headers = [*reject.headers, *_about(reject, fence)]
    told = Message(reject.value, reject.key, [*headers, *_for_tools(reject)])
    if batch_size(told) <= limit:
        return told
    whole = Message(reject.value, reject.key, headers)
    over = batch_size(whole) - limit
    if over <= 0:
        return whole
    if 0 < over < len(reject.reason[:_LONGEST].encode()):
        short = reject.reason[:_LONGEST].encode()[:-over].decode(errors="ignore")
        about = _about(replace(reject, reason=short), fence)
        return Message(reject.value, reject.key, [*reject.headers, *about])
    return _without(reject, limit, fence, _lengths(reject))


def again(of: DeadLetter, limit: int, pipeline: str) -> Message:
    """The dead letter of a record that a replay could not write either."""
    fence = Fence(pipeline, of.epoch)
    if of.left_out is None:
        return dead_letter(of.reject, limit, fence)
    return _without(of.reject, limit, fence, of.left_out)


def dead_letters(rejects: Sequence[Reject], limit: int, fence: Fence) -> list[Message]:
    """The dead letters of all rejects, in order."""
    return [dead_letter(one, limit, fence) for one in rejects]


def opened(record: KafkaRecord, pipeline: str) -> DeadLetter | None:
    """A record of the rejects' topic as a dead letter of this pipeline; None if it is not."""
    headers = list(record.headers)
    at = next((i for i in reversed(range(len(headers))) if headers[i][0] == _FIRST), None)
    if at is None or headers[at][1] != pipeline.encode():
        return None
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[at:]}
    try:
        partition = TopicPartition(own["oncely.topic"], int(own["oncely.partition"]))
        when = own["oncely.timestamp_ms"]
        reject = Reject(
            partition,
            int(own["oncely.offset"]),
            int(when) if when else None,
            record.key,
            record.value,
            headers[:at],
            own["oncely.stage"],
            own["oncely.reason"],
        )
        return DeadLetter(reject, int(own["oncely.epoch"]), own.get("oncely.left_out"))
    except (KeyError, ValueError):  # written by another program
        return None


def _about(reject: Reject, fence: Fence) -> list[tuple[str, bytes]]:
    about = [
        (_FIRST, fence.pipeline),
        ("oncely.epoch", str(fence.epoch)),
        ("oncely.topic", reject.partition.topic),
        ("oncely.partition", str(reject.partition.partition)),
        ("oncely.offset", str(reject.offset)),
        ("oncely.timestamp_ms", "" if reject.timestamp_ms is None else str(reject.timestamp_ms)),
        ("oncely.stage", reject.stage),
        ("oncely.reason", reject.reason[:_LONGEST]),
    ]
    if reject.value is None:
        about.append(("oncely.tombstone", "true"))
    return [(name, text.encode()) for name, text in about]


def _for_tools(reject: Reject) -> list[tuple[str, bytes]]:
    """The headers of Karafka's dead letters, and of those of Spring Cloud Stream."""
    about = [
        ("source_topic", reject.partition.topic),
        ("source_partition", str(reject.partition.partition)),
        ("source_offset", str(reject.offset)),
        ("x-original-topic", reject.partition.topic),
        ("x-exception-message", reject.reason[:_LONGEST]),
    ]
    return [(name, text.encode()) for name, text in about]


def _without(reject: Reject, limit: int, fence: Fence, left_out: str) -> Message:
    own = [*_about(reject, fence), ("oncely.left_out", left_out.encode())]
    without = Message(None, reject.key, [*reject.headers, *own])
    return without if batch_size(without) <= limit else Message(None, None, own)


def _lengths(reject: Reject) -> str:
    return (
        f"too large for this topic: key {len(reject.key or b'')} bytes,"
        f" value {len(reject.value or b'')} bytes, {len(reject.headers)} headers"
    )


def replaying(pipeline_topics: PipelineTopics) -> PipelineTopics:
    """The pipeline's topics with the group that has the positions of replays."""
    return replace(pipeline_topics, group=replay_group(pipeline_topics.group))


@dataclass(frozen=True)
class ReplayPosition:
    """The position of replays.

    Attributes:
        topic_id: the id of the rejects' topic; positions are void in another topic of its name.
        positions: the next dead letter, for every partition of the rejects' topic.
        view: the ledger.
    """

    topic_id: str
    positions: Mapping[TopicPartition, Position]
    view: View

    @property
    def compared(self) -> object:
        """The state that must not change between reading dead letters and the commit of their
        replay."""
        return self.topic_id, self.positions, self.view.resets

    def waits(self, letter: DeadLetter) -> bool:
        """True if no reset has made the pipeline read the dead letter's record again."""
        tp, offset = letter.origin
        resets = self.view.resets.get(tp, {})
        return not any(epoch > letter.epoch and at <= offset for epoch, at in resets.items())


class DeadLetterTopic:
    """The dead letters of one pipeline.

    Args:
        cluster: open clients, with the group of replays.
        topic: the rejects' topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster, self.topic = cluster, topic

    def count(self) -> int:
        """The number of waiting dead letters. Raises the errors of :meth:`survey`."""
        return sum(1 for _ in self._waiting())

    def survey(self, limit: int) -> tuple[list[Reject], int]:
        """The first dead letters by topic, partition and offset of their records, and their total
        number.

        Raises:
            Unavailable: no answer.
        """
        total = 0

        def counted() -> Iterator[DeadLetter]:
            nonlocal total
            for one in self._waiting():
                total += 1
                yield one

        first = heapq.nsmallest(limit, counted(), key=lambda one: one.origin)
        return [one.shown for one in first], total

    def _waiting(self) -> Iterator[DeadLetter]:
        """The visible dead letters: an open transaction may hide some, and a replay may move
        meanwhile."""
        ends = self.ends()
        position = self.position(certain=False)
        if position is not None:
            yield from DeadLetterReader(self._cluster.pipeline_topics, position, ends).letters()

    def ends(self) -> dict[TopicPartition, Position]:
        """The last stable offset of each partition; empty: there is no such topic."""
        known = topics.identified(self._cluster.admin, self.topic)
        if known is None:
            return {}
        wanted = {TopicPartition(self.topic, n): OffsetSpec.latest() for n in range(known[1])}
        return topics.offsets(self._cluster.admin, "describe the rejects' topic", wanted)

    def position(self, *, certain: bool) -> ReplayPosition | None:
        """The position of replays; None: there are no dead letters, or the pipeline never ran.

        Args:
            certain: wait for open transactions that may hide it. Read after ``init`` of the
                replayer's id, it cannot change any more before that instance commits. Otherwise the
                visible position, which may have moved since.

        Raises:
            ConfigError: the group belongs to another pipeline.
            Unavailable: a transaction stayed open, or no answer.
        """
        cluster = self._cluster
        known = topics.identified(cluster.admin, self.topic)
        if known is None or topics.missing(cluster.admin, [cluster.pipeline_topics.ledger_topic]):
            return None
        topic_id, number = known
        wanted = [TopicPartition(self.topic, one) for one in range(number)]
        stamps = cluster.stamped_offsets(wanted) if certain else {}
        stamps = {tp: one for tp, one in stamps.items() if one.topic_id == topic_id}
        # A reset that another pipeline's open transaction hides in the ledger topic has voided dead
        # letters.
        view = cluster.settled() if certain else cluster.look()
        if view.pipeline is None:
            return None
        noted = {tp: one.position for tp, one in view.replayed.items() if one.topic_id == topic_id}
        refuse_foreign(stamps, cluster.pipeline_topics)
        found = {tp: one.position for tp, one in stamps.items()}
        positions = {tp: max(found.get(tp, 0), noted.get(tp, 0)) for tp in wanted}
        return ReplayPosition(topic_id, positions, view)


class DeadLetterReader:
    """Reads the dead letters once, from the position of replays to some ends.

    Attributes:
        positions: the next offset of every partition; grows during the iteration.
    """

    def __init__(
        self,
        pipeline_topics: PipelineTopics,
        position: ReplayPosition,
        ends: Mapping[TopicPartition, Position],
    ) -> None:
        self._pipeline_topics, self._position = pipeline_topics, position
        self._ranges = {
            tp: OffsetRange(at, ends[tp])
            for tp, at in position.positions.items()
            if at < ends.get(tp, 0)
        }
        self.positions: dict[TopicPartition, Position] = dict(position.positions)

    def letters(self) -> Generator[DeadLetter, None, None]:
        """The pipeline's waiting dead letters; those of other pipelines are skipped.

        Where an open transaction hides some of them, its end is awaited.

        Raises:
            Unavailable: a transaction stayed open, or the broker does not respond.
        """
        topics = self._pipeline_topics
        with closing(RecordReader(topics.brokers, topics.kafka)) as reader:
            for piece in reader.read(self._ranges, lost="skip", silence=topics.timeout):
                for tp, offset, record in each(piece.records):
                    self.positions[tp] = offset + 1
                    letter = opened(record, topics.pipeline)
                    if letter is not None and self._position.waits(letter):
                        yield letter
                self.positions[piece.partition] = piece.next
