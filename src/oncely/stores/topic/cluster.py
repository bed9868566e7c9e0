"""The clients of one process: a consumer that reads the ledger and the group, an admin client, and
producers that live for one transaction each.

The order of two requests is essential. Kafka's offsets have no compare-and-set, so a process that
moves a position first initialises the position's transactional id, which ends and fences every
other process that was about to move it, and only then reads the position.

Two transactional ids may move a position in turn, and a run keeps something between two commits.
While one id works, an instance of the other one is initialised for the next transaction. The
position that a commit writes names that other id. If its instance was initialised before the
commit, it alone can move the position: whoever reads the position and wants to move it initialises
the id later, and fences this instance. So the next transaction begins without reading. In every
other case the position is read after the id was initialised: the initialisation was not finished
before the commit, or the answer to the commit was lost (docs/decisions/0047).

Each instance is used for one transaction, as everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import confluent_kafka as ck

from oncely.core.claim import Entry
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import OncelyError, Stopped
from oncely.kafka.client import (
    ErrorState,
    KafkaAdmin,
    committed_offsets,
    make,
)
from oncely.kafka.properties import producer_config
from oncely.kafka.sender import Delivered, Plain, Producer
from oncely.kafka.topics import TOGETHER, TopicLog, identified, ledger_partition, require_partitions
from oncely.kafka.transaction import Transaction
from oncely.stores.document import Totals
from oncely.stores.topic.records import (
    NEXT,
    LedgerKeys,
    Mode,
    OffsetMetadata,
    PositionRecord,
    StoredPosition,
    View,
    read_stamp,
)

log = logging.getLogger(__name__)

READER: Mapping[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    # For an offset below the log start, the reader continues at the oldest message.
    "auto.offset.reset": "earliest",
    # Also makes a fetch of group offsets wait for pending ones (KIP-447).
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 20,
    "fetch.queue.backoff.ms": 5,
}
"""Properties of a consumer that reads a ledger topic, or another compacted one."""

_AGAIN = 0.05  # seconds


Connect = Callable[..., Any]
"""As :func:`oncely.kafka.client.make`; tests inject faults here."""


@dataclass(frozen=True)
class PipelineTopics:
    """The cluster, group and ledger topic of a pipeline. Picklable.

    Attributes:
        brokers: ``host:port``, separated by commas.
        pipeline: its name.
        group: the consumer group with the fast copies of the positions.
        ledger_topic: the compacted topic of positions and epochs.
        kafka: librdkafka's properties for the connection, as for the source. Never in a repr.
        producer: more properties of the producer.
        timeout: seconds to wait for a response.
        transaction_timeout: seconds after which the broker aborts a transaction.
        connect: creates clients.
    """

    brokers: str
    pipeline: str
    group: str
    ledger_topic: str
    kafka: Mapping[str, object] = field(default_factory=dict, repr=False)
    producer: Mapping[str, object] = field(default_factory=dict)
    timeout: float = 30.0
    transaction_timeout: float = 60.0
    connect: Connect = make

    @property
    def keys(self) -> LedgerKeys:
        """The encoding of ids and keys."""
        return LedgerKeys(self.pipeline)


class LedgerCopy(NamedTuple):
    """The contents of the ledger topic as read by one process, for another one. Picklable.

    Attributes:
        next: the next offset to read.
        view: the state of the ledger up to there.
        partition: that was read; None: not known yet.
    """

    next: int
    view: View
    partition: int | None


class Cluster:
    """The open clients of one process. Safe for several threads.

    Attributes:
        given: the last epoch of this process, by the partitions that it was to take over.
        starts: the start positions that no run had settled when this process took an epoch; the
            takeover that settles one may need several.
        turns: what is kept between two commits of a position that two ids move in turn.
        group_metadata: returns the group's metadata for the offsets of a commit (KIP-447);
            :meth:`no_member`, unless a member of the group sets its own here.
    """

    def __init__(self, topics: PipelineTopics) -> None:
        self.pipeline_topics, self.keys = topics, topics.keys
        self._error_state = ErrorState(topics.brokers)
        self._consumer: Any = None
        self.admin = KafkaAdmin(topics.brokers, topics.kafka, min(10.0, topics.timeout))
        self._writing = threading.Lock()
        self._plain: dict[frozenset[int], Plain] = {}
        self._reading = threading.RLock()
        # A separate lock: the lock above is held until transactions end, whose threads use the
        # consumer.
        self._connecting = threading.Lock()
        self._view = View()
        self._told = False  # a warning about foreign messages was logged
        self._partition: int | None = None
        self._alone = False  # no other partition has records of this pipeline
        self._log = TopicLog(
            topics.ledger_topic,
            "the ledger topic",
            self.admin,
            brokers=topics.brokers,
            timeout=topics.timeout,
            take=self._take,
            forget=self._forget,
            partition=self._own_partition,
        )
        self._seen: dict[TopicPartition, Entry] = {}
        self._totals: dict[TopicPartition, tuple[Entry, Totals | None]] = {}
        self.given: dict[frozenset[TopicPartition] | None, int] = {}
        self.starts: dict[TopicPartition, Position] = {}
        self.turns = AlternatingProducers()
        self.group_metadata: Callable[[], Any] = self.no_member

    def close(self) -> None:
        """Close the connections."""
        self._keep_plain({})
        self.turns.close()
        self.admin.close()
        with self._reading, self._connecting:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None

    # -- writing ---------------------------------------------------------------------------

    def transaction(
        self,
        transactional_id: str,
        sizes: Collection[int] = (1_000_000,),
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> Transaction:
        """A new producer instance, not initialised yet.

        Args:
            sizes: ``max.message.bytes`` of the topics of the transaction.
            defaults: properties of the producer that the user has not set.
        """
        topics = self.pipeline_topics
        wanted = {**defaults, **topics.producer}
        config = producer_config(
            wanted, transactional_id, round(topics.transaction_timeout * 1000), sizes
        )
        producer = topics.connect(
            Producer, topics.brokers, topics.kafka, ErrorState(topics.brokers), **config
        )
        made = Transaction(producer, topics.timeout, topics.brokers, topics.ledger_topic)
        made.placed = {topics.ledger_topic: self._own_partition}
        return made

    @contextmanager
    def plain(self, sizes: Collection[int] = (1_000_000,)) -> Iterator[Plain]:
        """The producer without transactions, kept for the next one unless something fails.

        Used by one thread at a time.
        """
        with self._writing:
            kept = self._plain.pop(frozenset(sizes), None) or self._new_plain(sizes)
            try:
                yield kept
            except BaseException:
                kept.close()
                raise
            self._keep_plain({frozenset(sizes): kept})

    def _keep_plain(self, plain: dict[frozenset[int], Plain]) -> None:
        others, self._plain = self._plain, plain
        for one in others.values():
            one.close()

    def _new_plain(self, sizes: Collection[int]) -> Plain:
        topics, delivered = self.pipeline_topics, Delivered()
        config = producer_config(topics.producer, None, round(topics.timeout * 1000), sizes)
        producer = topics.connect(
            Producer,
            topics.brokers,
            topics.kafka,
            ErrorState(topics.brokers),
            **config,
            on_delivery=delivered,
        )
        return Plain(producer, delivered, topics.timeout, topics.brokers)

    def no_member(self) -> Any:
        """The group's metadata of a consumer without a member id."""
        return self._connected().consumer_group_metadata()

    # -- reading ---------------------------------------------------------------------------

    def look(self) -> View:
        """The ledger as visible to committed readers now; an open transaction may hide its end."""
        return self._read(stable=False)

    def settled(self) -> View:
        """The ledger with all messages that are in the topic now; waits for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        return self._read(stable=True)

    def stable_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetMetadata]:
        """The pipeline's group offsets; waits while one is pending in a transaction (KIP-447).

        Raises the errors of :meth:`stamped_offsets`.
        """
        found = self.stamped_offsets(partitions)
        return {tp: one for tp, one in found.items() if one.pipeline == self.keys.pipeline}

    def stamped_offsets(
        self, partitions: Collection[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, OffsetMetadata]:
        """The group offsets with Oncely's metadata, of any pipeline.

        Args:
            partitions: the partitions to read.
            stable: wait while one is pending in a transaction, as in :meth:`stable_offsets`.

        Raises:
            OlderFormat: an offset is of a version before the first release.
            Unavailable: a transaction stayed open, or no answer.
        """
        topics = self.pipeline_topics
        if not partitions:
            return {}
        with ExitStack() as own:
            if stable:
                consumer = self._connected()
            else:
                consumer = own.enter_context(closing(self._reader(stable=False)))
            doing = f"read the offsets of group {topics.group!r}"
            return self._stamped(
                committed_offsets(consumer, partitions, topics.timeout, doing, topics.brokers)
            )

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position that is known to be committed. It may have moved since.

        It is safe for a decision: these positions have taken effect, and a commit reads them again
        after initialising its transactional id.
        """
        known = self.look().entries()
        return known | {tp: newer(known.get(tp), at) for tp, at in dict(self._seen).items()}

    def committed(self) -> dict[TopicPartition, Entry]:
        """Every position; waits while one of them is pending in a transaction."""
        known = self.entries()
        for tp, stamped in self.stable_offsets(known).items():
            self.remember(tp, stamped.entry)
            known[tp] = newer(known[tp], stamped.entry)
        return known

    def stored_positions(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, StoredPosition]:
        """The positions, read after ``init`` of the transactional id that moves them.

        The group's copy if there is one, or else (it may expire) the ledger topic's. Partitions
        without a position are left out.
        """
        found: dict[TopicPartition, StoredPosition] = dict(self.stable_offsets(partitions))
        if missing := [tp for tp in partitions if tp not in found]:
            known = self.settled().positions
            found |= {tp: known[tp] for tp in missing if tp in known}
        for tp, one in found.items():
            self.remember(tp, one.entry)
            self.learn_totals(tp, one)
        return found

    def learn_totals(self, tp: TopicPartition, position: StoredPosition) -> None:
        """Remember the totals of a committed position, for the next commit."""
        self._totals[tp] = position.entry, position.totals

    def totals(self, tp: TopicPartition, at: Position) -> Totals | None:
        """The totals that were learned at this position; None if they are of another one."""
        entry, totals = self._totals.get(tp, (None, None))
        return totals if entry is not None and entry.position == at else None

    def remember(self, tp: TopicPartition, entry: Entry) -> None:
        """Remember a committed position, though an open transaction may still hide it in the
        topic."""
        self._seen[tp] = newer(self._seen.get(tp), entry)

    def registered(self) -> View:
        """The ledger as far as this process has read it, at first use read now."""
        with self._reading:
            return self._view if self._log.next else self.look()

    # -- the ledger topic ------------------------------------------------------------------

    def copy(self) -> LedgerCopy:
        """The contents of the ledger topic that this process has read so far."""
        with self._reading:
            return LedgerCopy(self._log.next, self._view.copy(), self._partition)

    def learn(self, copy: LedgerCopy) -> None:
        """Continue from a copy of another process, unless this one has read more itself."""
        if copy.next <= self._log.next:
            return  # does not wait for a running read
        with self._reading:
            if copy.next > self._log.next:
                self._log.next, self._view, self._partition = copy[0], copy.view.copy(), copy[2]

    def _own_partition(self) -> int:
        if self._partition is None:
            name = self.pipeline_topics.ledger_topic
            own = ledger_partition(self.pipeline_topics.pipeline)
            if (known := identified(self.admin, name)) is None:
                return own  # the request that follows fails: there is no such topic
            require_partitions(name, known[1])
            self._partition = own
        return self._partition

    def bounds(self, *, stable: bool) -> tuple[int, int]:
        """First offset of the ledger topic, and its high watermark or last stable offset."""
        return self._log.bounds(stable=stable)

    def hides_its_end(self) -> bool:
        """True while an open transaction hides the end of the ledger topic."""
        return self.bounds(stable=False)[1] < self.bounds(stable=True)[1]

    def _read(self, *, stable: bool) -> View:
        with self._reading:
            self._log.read(self._connected, stable=stable)
            if self._view.pipeline is None and not self._alone:
                self._refuse_elsewhere()
                self._alone = True
            return self._view.copy()

    def _refuse_elsewhere(self) -> None:
        """Refuse records of the pipeline in other partitions: its ledger only appears empty."""
        own, topics = self._own_partition(), self.pipeline_topics
        _, partitions = identified(self.admin, topics.ledger_topic) or ("", 0)
        with closing(Cluster(topics)) as there:
            there._consumer = there._reader(stable=False)  # waits for no transaction
            there._alone = there._told = True
            for one in sorted({*range(partitions)} - {own}):
                there._log.restart()
                there._partition = one
                if there.settled() != View():
                    raise Stopped(
                        f"ledger topic {topics.ledger_topic!r} has records of {topics.pipeline!r}"
                        f" in partition {one} and none in its own, {own}: partitions were added to"
                        " the topic, or it was restored into others",
                        way_out="move to a new sink.ledger_topic as docs/worker.md describes",
                    )

    def _take(self, message: Any) -> None:
        ours = self.keys.take(self._view, message.key(), message.value())
        if not ours and not self._told:
            self._told = True
            log.warning(
                "the ledger topic %s holds messages of another program, the first at offset %d;"
                " they are ignored",
                self.pipeline_topics.ledger_topic,
                message.offset(),
            )

    def _forget(self) -> None:
        self._view = View()

    def _connected(self) -> Any:
        with self._connecting:
            if self._consumer is None:
                self._consumer = self._reader()
            return self._consumer

    def _reader(self, *, stable: bool = True) -> Any:
        topics = self.pipeline_topics
        level = {} if stable else {"isolation.level": "read_uncommitted"}
        own = {**READER, **level, "group.id": topics.group}
        return topics.connect(ck.Consumer, topics.brokers, topics.kafka, self._error_state, **own)

    @staticmethod
    def _stamped(found: Collection[Any]) -> dict[TopicPartition, OffsetMetadata]:
        stamps: dict[TopicPartition, OffsetMetadata] = {}
        for one in found:
            if stamped := read_stamp(one.offset, one.metadata):
                stamps[TopicPartition(one.topic, one.partition)] = stamped
        return stamps


def newer(one: Entry | None, other: Entry) -> Entry:
    """The later of two readings of a position: a new epoch may move it back, within one it
    grows."""
    if one is None or (other.epoch, other.position) > (one.epoch, one.position):
        return other
    return one


KEPT = 32
"""Instances that are initialised and wait for their transaction, at most."""

Initialise = Callable[[Mode], Transaction]


@dataclass
class AlternatingProducer:
    """The instances of both ids of a position, by the mode that names them.

    Attributes:
        sizes: ``max.message.bytes`` of the topics that the instances were made for.
        start: begins to initialise an id.
        moved: where our own commit has put the position.
        alone: True if only our instance can move it from there.
    """

    instances: dict[Mode, Future[Transaction]]
    sizes: frozenset[int]
    start: Callable[[Mode], Future[Transaction]]
    moved: PositionRecord | None = None
    alone: bool = False

    def suits(self, sizes: Collection[int]) -> bool:
        """True if the instances can write to topics with this ``max.message.bytes``."""
        least, most = min(self.sizes, default=0), max(self.sizes, default=0)
        return all(least <= one <= most for one in sizes)

    def known(self, expected: Entry) -> PositionRecord | None:
        """The position, if it need not be read; otherwise the ids that it may name are initialised
        when this returns."""
        own = self.moved if self.moved is not None and self.moved.entry == expected else None
        for mode in NEXT if own is None else [own.mode]:
            self.instance(mode)
        return own if self.alone else None

    def instance(self, mode: Mode) -> Transaction:
        """The instance that a position with this mode names."""
        return self.instances[mode].result()

    def next(self, writer: Transaction, mode: Mode, moved: PositionRecord) -> AlternatingProducer:
        """The turn of the other id, after a commit by ``writer`` that was answered.

        The id that was used is initialised again from now on.
        """
        other = self.instances[NEXT[mode]]
        ready = other.done() and not other.cancelled() and other.exception() is None
        alone = ready and other.result().is_older_than_end_of(writer)
        instances = {NEXT[mode]: other, mode: self.start(mode)}
        return AlternatingProducer(instances, self.sizes, self.start, moved, alone)

    def close(self) -> None:
        """Close the instances, and wait for those that are being initialised: a later
        initialisation of the same id would be fenced by them."""
        for one in self.instances.values():
            one.add_done_callback(_close)
        wait([one for one in self.instances.values() if not one.cancel()])


class AlternatingProducers:
    """The turns of a process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[TopicPartition, AlternatingProducer] = {}
        self._pool: ThreadPoolExecutor | None = None

    def taken(
        self, tp: TopicPartition, sizes: Collection[int], initialise: Initialise
    ) -> AlternatingProducer:
        """The turn that was kept, or a new one; it belongs to the caller until it is kept."""
        with self._lock:
            turn = self._kept.pop(tp, None)
        if turn is not None and turn.suits(sizes):
            return turn
        if turn is not None:
            turn.close()

        def start(mode: Mode) -> Future[Transaction]:
            return self._executor().submit(initialise, mode)

        return AlternatingProducer({mode: start(mode) for mode in NEXT}, frozenset(sizes), start)

    def keep(self, tp: TopicPartition, turn: AlternatingProducer) -> None:
        """Keep a turn until the next commit; the oldest ones are dropped beyond :data:`KEPT`."""
        with self._lock:
            self._kept[tp] = turn
            for oldest in list(self._kept)[: -(KEPT // len(NEXT))]:
                self._kept.pop(oldest).close()

    def close(self) -> None:
        """Close all instances."""
        with self._lock:
            kept, self._kept = self._kept, {}
            pool, self._pool = self._pool, None
        for turn in kept.values():
            turn.close()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(TOGETHER, "oncely-init")
            return self._pool


def _close(done: Future[Transaction]) -> None:
    with contextlib.suppress(OncelyError):
        if not done.cancelled():
            done.result().close()
