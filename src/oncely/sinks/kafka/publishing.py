"""Batch commit: the driver publishes a micro-batch in one transaction.

Staged messages, dead letters, ledger records and offsets of all topic-partitions take effect
together, by the publisher's transactional id. In a run of batch commit that id moves every
position that there is, also over holes (docs/decisions/0012), so init, read, write, commit is a
compare-and-set of all of them at once.

The transaction must end before ``sink.transaction_timeout``, or the broker aborts it. What
is published waits in files until it begins, and what the tasks took to make it does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import numpy as np
import pyarrow as pa

from oncely.core.ledger import Entry
from oncely.core.offsets import TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.errors import InvariantViolation, Unavailable, check
from oncely.sinks.base import (
    Fence,
    Publication,
    RangeKind,
    StagedRowsGone,
)
from oncely.sinks.kafka.cluster import Cluster
from oncely.sinks.kafka.columns import Columns, binaries
from oncely.sinks.kafka.form import Form, header_lists
from oncely.sinks.kafka.letters import letters
from oncely.sinks.kafka.messages import Limits
from oncely.sinks.kafka.sender import Message, Sender
from oncely.sinks.kafka.settling import refuse_moved, write_moves
from oncely.sinks.kafka.staging import Staging
from oncely.sinks.kafka.words import Moved

# What librdkafka holds at most of a publication, whatever its size.
_QUEUE = {"queue.buffering.max.messages": 200_000, "queue.buffering.max.kbytes": 65_536}


InTime = Callable[[], float]
"""Seconds that are left of the transaction.

Raises:
    Unavailable: none.
"""


class Load(Protocol):
    """What a publication brings beside dead letters and positions."""

    def topics(self, what: Publication) -> list[str]:
        """The topics that :meth:`send` will write to."""

    def ready(self) -> None:
        """The transactional id is initialised, and nothing is begun.

        What only transactions of this id change does not change any more until our own commit.

        Raises:
            StagedRowsGone: what was staged does not fit any more.
        """

    def send(self, writer: Sender, what: Publication, fence: Fence, in_time: InTime) -> None:
        """Send it; ``in_time`` is asked now and then.

        Raises:
            StagedRowsGone: it is not there any more.
        """

    def fresh(self) -> None:
        """The broker has all of it, so the transaction's time runs there; the commit is next.

        Raises:
            StagedRowsGone: too old to be published.
        """


@dataclass(frozen=True)
class StagedMessages:
    """Messages that tasks have left in files.

    Attributes:
        form: says where messages go that name no topic.
        staging: where they are.
    """

    form: Form
    staging: Staging

    def topics(self, what: Publication) -> list[str]:
        """What will be written to; where records name their topics, the files are looked at."""
        if self.form.topic is not None:
            return [self.form.topic]
        found: set[str] = set()
        for one in what.staged:
            for batch in self.staging.read(one.name, ["topic"]) if one.name else ():
                found.update(batch.column("topic").unique().to_pylist())
        return sorted(found)

    def ready(self) -> None:
        """Messages are as they were staged."""

    def fresh(self) -> None:
        """They have no age."""

    def send(self, writer: Sender, what: Publication, fence: Fence, in_time: InTime) -> None:  # noqa: ARG002 - the port's
        """Send the files, one part after another, and demand that they hold all rows."""
        for one in what.staged:
            found = 0
            for batch in self.staging.read(one.name) if one.name else ():
                self._send(writer, batch)
                found += batch.num_rows
                in_time()
            check(found <= one.rows, f"{one.name} holds {found} rows, and {one.rows} were staged")
            if found < one.rows:
                raise StagedRowsGone(
                    f"a task staged {one.rows} rows in {one.name}, and {found} were there to"
                    " publish; the batch is done again"
                )

    def _send(self, writer: Sender, batch: pa.RecordBatch) -> None:
        for topic, part in _by_topic(batch, self.form.topic):
            plain = Columns(part.column("key"), part.column("value"))
            if self.form.headers is None:
                writer.send_columns(topic, plain)
            else:
                values, keys = binaries(plain.value), binaries(plain.key)
                headers = header_lists(part.column("headers"))
                writer.send(topic, map(Message, values, keys, headers))


@dataclass(frozen=True)
class Publisher:
    """Publishes for one sink.

    Attributes:
        cluster: the open clients.
        load: what is published.
        rejects_topic: where dead letters go.
        largest: tells the topics' ``max.message.bytes``.
    """

    cluster: Cluster
    load: Load
    rejects_topic: str
    largest: Limits

    def publish(
        self,
        what: Publication,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        kind: RangeKind = "data",
    ) -> None:
        """One transaction, or nothing.

        ``init`` ends and fences whoever was about to move the positions; only what is read
        after it can't change before our own commit.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: nobody knows, or it took too long; read the ledger and decide again.
        """
        claims = _claims(what, entries, fence)
        if not claims:
            return
        moves = self._moves(what, claims, fence, kind)
        sizes = self.largest(self._topics(what))
        words = self.cluster.place.words
        with self.cluster.transaction(words.publisher, sizes.values(), _QUEUE) as writer:
            writer.init()
            refuse_moved(self.cluster, claims, "batch")
            self.load.ready()
            with self._in_time() as in_time:
                writer.begin()
                self.load.send(writer, what, fence, in_time)
                if what.rejects:
                    limit = sizes[self.rejects_topic]
                    writer.send(self.rejects_topic, letters(what.rejects, limit, fence))
                # Last: until the commit they hide from others what follows in the ledger topic.
                write_moves(self.cluster, writer, moves)
                writer.flush(in_time())
                self.load.fresh()
                in_time()
            writer.commit()
        for tp, moved in moves.items():
            self.cluster.remember(tp, moved.entry)

    def write(self, what: Publication, fence: Fence) -> None:
        """Staged messages and dead letters without a transaction, and no position.

        Raises:
            Unavailable: nobody knows how much was written.
        """
        sizes = self.largest(self._topics(what))
        with self.cluster.plain(sizes.values()) as writer:
            self.load.fresh()
            self.load.send(writer, what, fence, lambda: 0.0)
            if what.rejects:
                writer.send(
                    self.rejects_topic, letters(what.rejects, sizes[self.rejects_topic], fence)
                )
            writer.finish()

    def _topics(self, what: Publication) -> list[str]:
        """What will be written to; the producer has to know their limits beforehand."""
        return [*([self.rejects_topic] if what.rejects else []), *self.load.topics(what)]

    def _moves(
        self,
        what: Publication,
        claims: Mapping[TopicPartition, Entry],
        fence: Fence,
        kind: RangeKind,
    ) -> dict[TopicPartition, Moved]:
        registered = self.cluster.registered().pipeline
        if registered is None:
            raise InvariantViolation(f"pipeline {fence.pipeline!r} is not in the ledger")
        written = what.counted(sum(one.rows for one in what.staged))
        moves = {}
        for tp in claims:
            range_, done = what.ranges[tp], written[tp]
            moves[tp] = Moved(
                range_.end,
                fence.epoch,
                registered.cluster,
                registered.topic_ids.get(tp.topic, ""),
                range_.start,
                range_.end,
                kind,
                done.records,
                done.rows,
                done.rejects,
                done.filtered,
                "batch",
            )
        return moves

    @contextmanager
    def _in_time(self) -> Iterator[InTime]:
        """Tell seconds that are left, and say so when what fails has taken too long."""
        begun, allowed = monotonic(), self.cluster.place.transaction_timeout

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


def _claims(
    what: Publication, entries: Mapping[TopicPartition, Entry], fence: Fence
) -> dict[TopicPartition, Entry]:
    """The entries that the batch was decided on, of partitions that have a range to move over.

    Raises:
        InvariantViolation: the batch does not begin where they stand.
    """
    check(what.query is None, "Kafka keeps no batch id of a query that brings its checkpoint")
    ranges: dict[TopicPartition, OffsetRange] = dict(sorted(what.ranges.items()))
    claims = {tp: entries[tp] for tp, range_ in ranges.items() if not range_.is_empty}
    for tp, entry in claims.items():
        check(entry.epoch == fence.epoch, f"{tp}: decided on another epoch's entry")
        check(entry.position == ranges[tp].start, f"{tp}: the batch begins elsewhere")
    empty = not what.rejects and not any(one.rows for one in what.staged)
    check(bool(claims) or empty, "rows without a range: no position tells that they were written")
    return claims


def _by_topic(batch: pa.RecordBatch, only: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The messages of each topic, in order."""
    if only is not None:
        yield only, batch
        return
    topics = batch.column("topic").dictionary_encode()
    index = topics.indices.to_numpy()
    for at, topic in enumerate(topics.dictionary.to_pylist()):
        yield topic, batch.take(pa.array(np.flatnonzero(index == at)))
