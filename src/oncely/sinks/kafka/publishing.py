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

from oncely.clients.kafka.producer import Columns, binaries
from oncely.clients.kafka.sender import Message, Sender
from oncely.core.batch import Batch, StagedRowsGone
from oncely.core.claim import Claim, Fence
from oncely.errors import Unavailable, check
from oncely.ledgers.topic.cluster import Cluster
from oncely.ledgers.topic.compare_and_set import moving, write_positions
from oncely.sinks.kafka.letters import letters
from oncely.sinks.kafka.messages import Limits
from oncely.sinks.kafka.record_format import RecordFormat, header_lists
from oncely.sinks.kafka.staging import Staging

# What librdkafka holds at most of a publication, whatever its size.
_QUEUE = {"queue.buffering.max.messages": 200_000, "queue.buffering.max.kbytes": 65_536}


InTime = Callable[[], float]
"""Seconds that are left of the transaction.

Raises:
    Unavailable: none.
"""


class Load(Protocol):
    """What a publication brings beside dead letters and positions."""

    def topics(self, batch: Batch) -> list[str]:
        """The topics that :meth:`send` will write to."""

    def ready(self) -> None:
        """The transactional id is initialised, and nothing is begun.

        What only transactions of this id change does not change any more until our own commit.

        Raises:
            StagedRowsGone: what was staged does not fit any more.
        """

    def send(self, writer: Sender, batch: Batch, fence: Fence, in_time: InTime) -> None:
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

    form: RecordFormat
    staging: Staging

    def topics(self, batch: Batch) -> list[str]:
        """What will be written to; where records name their topics, the files are looked at."""
        if self.form.topic is not None:
            return [self.form.topic]
        found: set[str] = set()
        for one in batch.staged:
            for part in self.staging.read(one.name, ["topic"]) if one.name else ():
                found.update(part.column("topic").unique().to_pylist())
        return sorted(found)

    def ready(self) -> None:
        """Messages are as they were staged."""

    def fresh(self) -> None:
        """They have no age."""

    def send(self, writer: Sender, batch: Batch, fence: Fence, in_time: InTime) -> None:  # noqa: ARG002 - the port's
        """Send the files, one part after another, and demand that they hold all rows."""
        for one in batch.staged:
            found = 0
            for part in self.staging.read(one.name) if one.name else ():
                self._send(writer, part)
                found += part.num_rows
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

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """One transaction, or nothing; without a claim no transaction, and no position.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: nobody knows, or it took too long; read the ledger and decide again.
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
            check(empty, "rows without a range: no position tells that they were written")
            return
        with moving(self.cluster, "batch", claim, sizes.values(), _QUEUE) as writer:
            self.load.ready()
            with self._in_time() as in_time:
                writer.begin()
                self._send(writer, batch, fence, sizes, in_time)
                # Last: until the commit they hide from others what follows in the ledger topic.
                write_positions(self.cluster, writer, "batch", claim, counts)
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
        self.load.send(writer, batch, fence, in_time)
        if batch.rejects:
            limit = sizes[self.rejects_topic]
            writer.send(self.rejects_topic, letters(batch.rejects, limit, fence))

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


def _by_topic(batch: pa.RecordBatch, only: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The messages of each topic, in order."""
    if only is not None:
        yield only, batch
        return
    topics = batch.column("topic").dictionary_encode()
    index = topics.indices.to_numpy()
    for at, topic in enumerate(topics.dictionary.to_pylist()):
        yield topic, batch.take(pa.array(np.flatnonzero(index == at)))
