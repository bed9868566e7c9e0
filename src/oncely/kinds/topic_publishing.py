"""Batch commit: the driver publishes a batch in one transaction.

Messages, dead letters, ledger records and offsets of all topic-partitions take effect
together, by the publisher's transactional id. In a run of batch commit that id moves every
position, also over holes (docs/decisions/0012), so init, read, write, commit is a compare-and-set
of all of them at once.

The transaction must end before ``sink.transaction_timeout``, or the broker aborts it. All messages
are made before it begins, and the duration of the tasks does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from oncely.core.batch import Batch, StagedRowsGone
from oncely.core.claim import Claim, Fence
from oncely.errors import Unavailable, check
from oncely.kafka.sender import Sender
from oncely.kinds.topic_dead_letters import dead_letters
from oncely.stores.topic.cluster import Cluster
from oncely.stores.topic.compare_and_set import moving, write_positions

# Upper bound of a publication's memory in librdkafka, for any size.
_QUEUE = {"queue.buffering.max.messages": 200_000, "queue.buffering.max.kbytes": 65_536}


Sizes = Callable[[Sequence[str]], Mapping[str, int]]
"""Names of topics to ``max.message.bytes``."""

InTime = Callable[[], float]
"""The remaining seconds of the transaction.

Raises:
    Unavailable: no time is left.
"""


class Load(Protocol):
    """The messages of a publication besides dead letters and positions."""

    def topics(self, batch: Batch) -> list[str]:
        """The topics to which :meth:`send` will write."""

    def ready(self) -> None:
        """Called when the transactional id is initialised, before the transaction begins.

        State that only transactions of this id change is constant from here to our own commit.

        Raises:
            StagedRowsGone: the staged output does not fit any more.
        """

    def send(self, writer: Sender, batch: Batch, in_time: InTime) -> None:
        """Send the messages; ``in_time`` is called repeatedly."""

    def fresh(self) -> None:
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
