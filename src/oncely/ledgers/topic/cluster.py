"""What one process holds open to the cluster: a consumer that reads the ledger and the group,
an admin client, and producers that live for one transaction each.

The order of two questions is the heart of it. Kafka's offsets have no compare-and-set, so who
wants to move a position first initialises the position's transactional id, which ends and
fences whoever was about to move it, and only then asks where it stands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.client import ErrorState, KafkaAdmin, classify_error, make
from oncely.clients.kafka.compacted_topic import TopicLog
from oncely.clients.kafka.non_transactional import Delivered, Plain
from oncely.clients.kafka.producer import Producer
from oncely.clients.kafka.producer_settings import producer_config
from oncely.clients.kafka.transaction import Transaction
from oncely.core.ledger import Entry
from oncely.core.topics import TopicPartition
from oncely.ledgers.topic.records import (
    LedgerKeys,
    OffsetMetadata,
    StoredPosition,
    View,
    read_stamp,
)

log = logging.getLogger(__name__)

READER: Mapping[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "earliest",
    # Also what makes a fetch of group offsets wait for pending ones (KIP-447).
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 20,
    "fetch.queue.backoff.ms": 5,
}

_PASSING = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)
"""The group's coordinator moves or begins, or an offset is pending in a transaction."""
_AGAIN = 0.05  # seconds


class Connect(Protocol):
    """Makes a client of librdkafka's; the one place where a test puts faults."""

    def __call__(
        self, kind: Any, brokers: str, kafka: Mapping[str, object], trouble: ErrorState, **own: Any
    ) -> Any:
        """As :func:`oncely.clients.kafka.client.make`."""


@dataclass(frozen=True)
class PipelineTopics:
    """Where a pipeline writes. Picklable.

    Attributes:
        brokers: ``host:port``, separated by commas.
        pipeline: its name.
        group: the consumer group that holds the positions' fast copies.
        ledger_topic: the compacted topic that holds positions and epochs.
        kafka: librdkafka's keys for the connection, as the source's. Never in a repr.
        producer: further keys of the producer.
        timeout: seconds that one answer may take.
        transaction_timeout: seconds after which the broker aborts a transaction.
        connect: how clients are made.
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
    def words(self) -> LedgerKeys:
        """The spelling of ids and keys."""
        return LedgerKeys(self.pipeline)


class LedgerCopy(NamedTuple):
    """What one process has read of the ledger topic, for another one. Picklable.

    Attributes:
        next: the offset behind it.
        view: the ledger's words up to there.
    """

    next: int
    view: View


class Cluster:
    """The open clients of one process. Safe for several threads.

    Attributes:
        given: the epoch that was given to this process last; 0: none.
    """

    def __init__(self, place: PipelineTopics) -> None:
        self.place = place
        self._trouble = ErrorState(place.brokers)
        self._consumer: Any = None
        self.asker = KafkaAdmin(place.brokers, place.kafka, min(10.0, place.timeout))
        self._writing = threading.Lock()
        self._plain: dict[frozenset[int], Plain] = {}
        self._reading = threading.RLock()
        # Not the lock above: it is held until transactions end, whose threads ask for the consumer.
        self._connecting = threading.Lock()
        self._view = View()
        self._told = False  # of messages that are no ledger records
        self._log = TopicLog(
            place.ledger_topic,
            "the ledger topic",
            self.asker,
            brokers=place.brokers,
            timeout=place.timeout,
            take=self._take,
            forget=self._forget,
        )
        self._seen: dict[TopicPartition, Entry] = {}
        self.given = 0

    def close(self) -> None:
        """Close the connections."""
        self._plain = {}
        self.asker.close()
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
            sizes: ``max.message.bytes`` of the topics that will be written to.
            defaults: of the producer's keys, where the user has set nothing.
        """
        place = self.place
        wanted = {**defaults, **place.producer}
        config = producer_config(
            wanted, transactional_id, round(place.transaction_timeout * 1000), sizes
        )
        producer = place.connect(
            Producer, place.brokers, place.kafka, ErrorState(place.brokers), **config
        )
        return Transaction(producer, place.timeout, place.brokers, place.ledger_topic)

    @contextmanager
    def plain(self, sizes: Collection[int] = (1_000_000,)) -> Iterator[Plain]:
        """The producer without transactions, kept for the next one unless something fails.

        Used by one thread at a time.
        """
        with self._writing:
            kept = self._plain.pop(frozenset(sizes), None) or self._new_plain(sizes)
            yield kept
            self._plain = {frozenset(sizes): kept}

    def _new_plain(self, sizes: Collection[int]) -> Plain:
        place, delivered = self.place, Delivered()
        config = producer_config(place.producer, None, round(place.timeout * 1000), sizes)
        producer = place.connect(
            Producer,
            place.brokers,
            place.kafka,
            ErrorState(place.brokers),
            **config,
            on_delivery=delivered,
        )
        return Plain(producer, delivered, place.timeout, place.brokers)

    def group_metadata(self) -> Any:
        """What ``send_offsets_to_transaction`` wants to know of the group (KIP-447)."""
        return self._connected().consumer_group_metadata()

    # -- reading ---------------------------------------------------------------------------

    def look(self) -> View:
        """The ledger as committed readers see it now; an open transaction may hide its end."""
        return self._read(stable=False)

    def settled(self) -> View:
        """The ledger up to all that was in the topic when asked; waits for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        return self._read(stable=True)

    def stable_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetMetadata]:
        """The pipeline's group offsets; waits while one is pending in a transaction (KIP-447).

        Raises as :meth:`stamped_offsets` does.
        """
        owns, group = self.place.words.owns, self.place.group
        found = self.stamped_offsets(partitions)
        return {tp: one for tp, one in found.items() if owns(one, group)}

    def stamped_offsets(
        self, partitions: Collection[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, OffsetMetadata]:
        """The group offsets that carry a stamp, whichever pipeline has committed them.

        Args:
            partitions: which.
            stable: wait while one is pending in a transaction, as :meth:`stable_offsets`.

        A consumer is asked, not an admin client: librdkafka 2.16 crashes when an admin client
        is told that the group's coordinator has moved.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        doing = f"read the offsets of group {self.place.group!r}"
        wanted = [ck.TopicPartition(*tp) for tp in partitions]
        deadline = time.monotonic() + self.place.timeout
        consumer = self._connected() if stable else self._reader(stable=False)
        while wanted:
            left = max(0.1, deadline - time.monotonic())
            try:
                found = consumer.committed(wanted, left)
                bad = next((one.error for one in found if one.error), None)
            except KafkaException as error:
                bad = error.args[0]
            if bad is None:
                return self._stamped(found)
            if bad.code() not in _PASSING or time.monotonic() > deadline:
                raise classify_error(bad, doing, self.place.brokers)
            time.sleep(_AGAIN)
        return {}

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position that is known to be committed. It may have moved on already.

        Safe for a decision all the same: what it shows has taken effect, and whoever acts on it
        asks again after initialising its transactional id.
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

    def standing(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, StoredPosition]:
        """Where positions stand, asked after ``init`` of the transactional id that moves them.

        The group's copy if there is one, or else (they expire) the ledger topic. Partitions
        without a position are left out.
        """
        found: dict[TopicPartition, StoredPosition] = dict(self.stable_offsets(partitions))
        if missing := [tp for tp in partitions if tp not in found]:
            known = self.settled().positions
            found |= {tp: known[tp] for tp in missing if tp in known}
        for tp, one in found.items():
            self.remember(tp, one.entry)
        return found

    def remember(self, tp: TopicPartition, entry: Entry) -> None:
        """What was seen for certain, though an open transaction may still hide it in the topic."""
        self._seen[tp] = newer(self._seen.get(tp), entry)

    def registered(self) -> View:
        """The ledger as far as this process has read it, read at first use."""
        with self._reading:
            return self._view if self._log.next else self.look()

    # -- the ledger topic ------------------------------------------------------------------

    def copy(self) -> LedgerCopy:
        """What this process has read of the ledger topic so far."""
        with self._reading:
            return LedgerCopy(self._log.next, self._view.copy())

    def learn(self, copy: LedgerCopy) -> None:
        """Go on from what another process has read, unless this one has read more itself."""
        if copy.next <= self._log.next:
            return  # without waiting for a reading that is under way
        with self._reading:
            if copy.next > self._log.next:
                self._log.next, self._view = copy.next, copy.view.copy()

    def bounds(self, *, stable: bool) -> tuple[int, int]:
        """First offset of the ledger topic, and its high watermark or last stable offset."""
        return self._log.bounds(stable=stable)

    def hides_its_end(self) -> bool:
        """True while an open transaction hides the end of the ledger topic."""
        return self.bounds(stable=False)[1] < self.bounds(stable=True)[1]

    def _read(self, *, stable: bool) -> View:
        with self._reading:
            self._log.read(self._connected, stable=stable)
            return self._view.copy()

    def _take(self, message: Any) -> None:
        ours = self.place.words.take(self._view, message.key(), message.value())
        if not ours and not self._told:
            self._told = True
            log.warning(
                "the ledger topic %s holds messages of another program, the first at offset %d;"
                " they are passed over",
                self.place.ledger_topic,
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
        place = self.place
        level = {} if stable else {"isolation.level": "read_uncommitted"}
        own = {**READER, **level, "group.id": place.group}
        return place.connect(ck.Consumer, place.brokers, place.kafka, self._trouble, **own)

    @staticmethod
    def _stamped(found: Collection[Any]) -> dict[TopicPartition, OffsetMetadata]:
        stamps: dict[TopicPartition, OffsetMetadata] = {}
        for one in found:
            if stamped := read_stamp(one.offset, one.metadata):
                stamps[TopicPartition(one.topic, one.partition)] = stamped
        return stamps


def newer(one: Entry | None, other: Entry) -> Entry:
    """Of two readings of a position the later: an epoch may put it back, within one it grows."""
    if one is None or (other.epoch, other.position) > (one.epoch, one.position):
        return other
    return one
