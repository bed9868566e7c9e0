"""Consumer groups: a member of any protocol.

One thread owns a :class:`GroupConsumer`. Callbacks of a rebalance run inside
:meth:`GroupConsumer.poll` and :meth:`GroupConsumer.close`; there the new partitions are assigned at
positions that the caller gives. Kafka's committed offsets are never read.

A call that takes many messages can run a callback between two of them. Messages that were fetched
before the callback are then in the same list as the new assignment. Messages of a partition that
was assigned during the call are dropped, and the partition is fetched again from its position:
otherwise messages of an earlier assignment could hide records between the position and themselves.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import ConfigError, InstanceTaken, OncelyError, Unavailable
from oncely.kafka.client import ErrorState, KafkaAdmin, classify_error, make, members, unreadable
from oncely.kafka.inbox import MESSAGE, NOT_THERE, PollResult, inbox_of
from oncely.kafka.records import RecordColumns

log = logging.getLogger("oncely.kafka.source")

Protocols = Literal["eager", "cooperative", "consumer"]

WORKER = "oncely-work/"
"""The beginning of the client ids of workers: the pipeline's name, and a digest of its ledger's
identity follow, each after a slash."""


def worker_id(pipeline: str, ledger: str) -> str:
    """The client id of a worker of a pipeline that writes into a ledger with this identity."""
    return f"{WORKER}{pipeline}/{hashlib.sha256(ledger.encode()).hexdigest()[:12]}"


_OWN = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    "fetch.queue.backoff.ms": 5,
    "topic.metadata.refresh.interval.ms": 30_000,  # partitions that are added
}
UNTAKEN = ck.OFFSET_BEGINNING
"""Where a partition is assigned that is paused until it is taken, and sought then. librdkafka asks
the broker for a logical offset, and an answer that comes after the seek replaces its position
(2.16): records from the beginning show it, and the partition is sought again; those before the end
would be taken for a hole.
"""
_MANY = 2_000  # messages that are taken at once; meanwhile no other thread runs Python
_ROWS = 50_000  # the same of columns; meanwhile other threads run
_ELSEWHERE = (  # the takeover of the partition finds the reason
    *NOT_THERE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
_OF_THE_GROUP = (
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.UNRELEASED_INSTANCE_ID,
)
_UNSUPPORTED = (KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE)


@dataclass(frozen=True)
class Membership:
    """How a member joins its group.

    Attributes:
        group: the name of the group.
        protocol: the protocol of the group's rebalances.
        instance: the name of a static member (KIP-345), or None.
        session_seconds: the time after which a silent member is removed; None for the client's
            default. With ``consumer`` the broker decides.
        poll_seconds: the longest time between two calls of ``poll``.
        client: the name of the client, with which the member's id begins. That of a worker is its
            :func:`worker_id`; workers of others are refused in its group then.
        polled_bytes: of the records that one call of ``poll`` returns, by the mean size of those
            before; librdkafka fetches a quarter of them ahead.
        marks: commit offsets to the group by :meth:`GroupConsumer.mark`; False where the group's
            offsets are the ledger's.
    """

    group: str
    protocol: Protocols = "cooperative"
    instance: str | None = None
    session_seconds: float | None = None
    poll_seconds: float = 300.0
    client: str | None = None
    polled_bytes: int = 64 << 20
    marks: bool = True

    def properties(self) -> dict[str, object]:
        """librdkafka's properties."""
        found: dict[str, object] = {
            "group.id": self.group,
            "max.poll.interval.ms": int(self.poll_seconds * 1000),
            # Little: a pause drops what was fetched of its partition, and it is fetched again.
            "queued.max.messages.kbytes": self.polled_bytes // 4 >> 10,
            "queued.min.messages": min(100_000, self.polled_bytes // 4 // MESSAGE),
        }
        if self.client is not None:
            found["client.id"] = self.client
        if self.instance is not None:
            found["group.instance.id"] = self.instance
        if self.protocol == "consumer":
            return {**found, "group.protocol": "consumer"}
        if self.session_seconds is not None:
            found["session.timeout.ms"] = int(self.session_seconds * 1000)
            found["heartbeat.interval.ms"] = int(min(3.0, self.session_seconds / 3) * 1000)
        strategy = "cooperative-sticky" if self.protocol == "cooperative" else "range"
        return {**found, "partition.assignment.strategy": strategy}


class Rebalances(Protocol):
    """The caller's side of rebalances; called inside ``poll`` and ``close``."""

    def assigned(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, Position]:
        """Partitions were assigned; returns where to begin. Those left out are paused."""

    def revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Partitions go to others when this returns; ``lost``: they have gone already."""


class GroupConsumer:
    """A member of a group.

    Args:
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties for the connection.
        topics: the topics of the subscription.
        membership: the group, and how to join it.
        rebalances: called at each change of the assignment.
        needs: names of :data:`oncely.kafka.records.RECORDS` that are read.

    Raises:
        ConfigError: librdkafka refuses a setting.
    """

    def __init__(
        self,
        brokers: str,
        kafka: Mapping[str, object],
        topics: Collection[str],
        membership: Membership,
        rebalances: Rebalances,
        needs: frozenset[str] = frozenset(),
    ) -> None:
        self._brokers, self._membership, self._rebalances = brokers, membership, rebalances
        self._kafka = kafka
        self._topics, self._needs = frozenset(topics), needs
        self._error_state = ErrorState(brokers)
        self._admin = KafkaAdmin(brokers, kafka, timeout=10.0)
        self._refuse_others()
        own = {**_OWN, **membership.properties(), "on_commit": _marked}
        # Not below message.max.bytes, which librdkafka refuses.
        least = max(1 << 20, membership.polled_bytes // 8)
        given = {"fetch.max.bytes": least, "fetch.wait.max.ms": 100, **kafka}
        self._consumer: Any = make(ck.Consumer, brokers, given, self._error_state, **own)
        self._inbox = inbox_of(
            self._consumer, _MANY, membership.polled_bytes, _ELSEWHERE, rows=_ROWS
        )
        self._begun: dict[TopicPartition, Position] = {}  # during the present call
        self._seeking: dict[TopicPartition, Position] = {}
        self._asked: dict[TopicPartition, Position] = {}  # where partitions are read from
        self._paused: set[TopicPartition] = set()  # in librdkafka
        self._polling = False
        self._failure: BaseException | None = None
        self._metadata: Any = None
        self._doing = f"work in group {membership.group!r}"
        self._consumer.subscribe(
            list(topics), on_assign=self._on_assign, on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )  # fmt: skip

    def poll(self, seconds: float) -> PollResult:
        """Records, as many as have arrived; waits for the first one.

        Raises:
            ConfigError: the broker refuses the client.
            InstanceTaken: another process has the same ``instance``.
            Unavailable: an error that librdkafka does not retry.
            The errors of :class:`Rebalances`.
        """
        self._begun = {}
        self._seek()
        self._polling = True
        try:
            polled = self._inbox.poll(seconds)
        except KafkaException as failure:
            raise self._meaning(failure.args[0]) from failure
        finally:
            self._polling = False
        self._raise(polled)
        self._metadata = self._consumer.consumer_group_metadata()
        # They may be of an earlier assignment: they are fetched, and the end is told, once more.
        for tp in self._begun.keys() & (polled.messages.keys() | polled.ends.keys()):
            self._seeking.setdefault(tp, self._begun[tp])
        for tp, found in polled.messages.items():
            if found[0].offset() < self._asked.get(tp, 0):  # see UNTAKEN
                log.info("%s: %s is sought again, it was read from elsewhere", self._doing, tp)
                self._seeking.setdefault(tp, self._asked[tp])
        for tp in self._begun.keys() | self._seeking.keys():
            polled.messages.pop(tp, None)
            polled.ends.pop(tp, None)
        for tp, found in polled.messages.items():
            if isinstance(found, RecordColumns):  # they are buffered, those of others perhaps not
                polled.messages[tp] = found.alone()
        return polled

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Fetch nothing of these partitions, and fetch all others.

        librdkafka is paused and resumed only here. It keeps a pause when the partition is revoked,
        and when it is assigned again; so does the set of what is paused.
        """
        wanted = set(partitions)
        if pausing := wanted - self._paused:
            self._consumer.pause([ck.TopicPartition(*tp) for tp in sorted(pausing)])
        if resuming := self._paused - wanted:
            self._consumer.resume([ck.TopicPartition(*tp) for tp in sorted(resuming)])
        self._paused = wanted

    def seek(self, tp: TopicPartition, position: Position) -> None:
        """Fetch a partition from a position on; messages from elsewhere are not returned.

        Inside the callback of a rebalance it takes place at the next :meth:`poll`: the present one
        may already have taken messages, which are not returned.
        """
        self._seeking[tp] = position
        if not self._polling:
            self._seek()

    def _seek(self) -> None:
        """Try what was not possible yet: librdkafka refuses while it starts a partition."""
        for tp, position in list(self._seeking.items()):
            try:
                self._consumer.seek(ck.TopicPartition(*tp, position))
            except KafkaException as error:
                log.debug("%s: can't seek to %s of %s yet: %s", self._doing, position, tp, error)
            else:
                self._asked[tp] = self._seeking.pop(tp)
                self._inbox.sought(tp)

    def mark(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Show positions as the group's offsets, in the background; failures are logged."""
        if not self._membership.marks:
            return
        offsets = [ck.TopicPartition(*tp, at) for tp, at in positions.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.debug("positions were not marked: %s", error)

    def metadata(self) -> Any:
        """This member of the group at the end of the last :meth:`poll`, for offsets in a
        transaction (KIP-447); for any thread.

        It is asked for anew in each call of ``poll``, as the generation changes with a rebalance.
        Not here: inside the callback of a rebalance librdkafka would not answer.

        Raises:
            Unavailable: nothing was polled yet.
        """
        if self._metadata is None:
            raise Unavailable(f"{self._doing}: it was not joined yet")
        return self._metadata

    def joined(self) -> bool:
        """True if the group's coordinator knows this member, with or without partitions.

        Raises the errors of :meth:`assigned_now`.
        """
        return bool(self._described())

    def assigned_now(self) -> frozenset[TopicPartition]:
        """The partitions that the group's coordinator has assigned to this member.

        Raises:
            ConfigError: the broker denies it.
            Unavailable: no answer.
        """
        return frozenset(
            TopicPartition(tp.topic, tp.partition)
            for member in self._described()
            if member.assignment is not None
            for tp in member.assignment.topic_partitions
        )

    def strangers(self) -> dict[TopicPartition, str]:
        """The partitions of the topics that members with another client id hold, each with its
        holder: for this pipeline nobody reads them.

        Raises the errors of :meth:`assigned_now`.
        """
        found = members(self._admin, self._membership.group)
        own = {one.client_id for one in found if one.member_id == self._consumer.memberid()}
        return {
            TopicPartition(tp.topic, tp.partition): f"{one.client_id} at {one.host}"
            for one in found
            if own and one.client_id not in own and one.assignment is not None
            for tp in one.assignment.topic_partitions
            if tp.topic in self._topics
        }

    def _described(self) -> list[Any]:
        own, group = self._consumer.memberid(), self._membership.group
        return [one for one in members(self._admin, group) if one.member_id == own]

    def _refuse_others(self) -> None:
        """Refuse a group that has members of another pipeline, or of one of this name with another
        ledger: each would get some partitions, and leave the others unread."""
        group, own = self._membership.group, self._membership.client or ""
        if not own.startswith(WORKER):
            return
        with suppress(Unavailable):
            others = [one for one in members(self._admin, group) if one.client_id != own]
            for other in sorted(others, key=lambda one: one.client_id):
                if not other.client_id.startswith(WORKER):
                    continue
                pipeline = _pipeline(other.client_id)
                where = (
                    ", and writes into another destination" if pipeline == _pipeline(own) else ""
                )
                raise ConfigError(
                    "worker.group",
                    f"pipeline {pipeline!r} works in group {group!r}, too{where}:"
                    f" {other.client_id} at {other.host}",
                    way_out="give each pipeline a name or a group of its own (source.group, with"
                    ' sink.kind = "kafka")',
                )

    def close(self) -> None:
        """Return the partitions, and leave the group."""
        self._inbox.close()
        self._admin.close()

    # -- callbacks -------------------------------------------------------------------------

    @property
    def _incremental(self) -> bool:
        return self._membership.protocol != "eager"

    def _on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        tps = frozenset(TopicPartition(one.topic, one.partition) for one in partitions)
        if tps:
            self._calling(self._refuse_others)  # which may have joined at the same time
        found = self._calling(lambda: self._rebalances.assigned(tps)) if tps else {}
        begins: Mapping[TopicPartition, Position] = found or {}
        at = [ck.TopicPartition(*tp, begins.get(tp, UNTAKEN)) for tp in sorted(tps)]
        self.pause(self._paused - tps)  # a pause of an earlier assignment
        self._inbox.enter(tps, self._needs)
        (consumer.incremental_assign if self._incremental else consumer.assign)(at)
        self.pause(self._paused | (tps - begins.keys()))
        self._begun |= begins
        self._asked |= begins
        for tp in begins:
            self._seeking.pop(tp, None)

    def _on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        self._leave(consumer, partitions, lost=False)

    def _on_lost(self, consumer: Any, partitions: list[Any]) -> None:
        self._leave(consumer, partitions, lost=True)

    def _leave(self, consumer: Any, partitions: list[Any], *, lost: bool) -> None:
        tps = frozenset(TopicPartition(one.topic, one.partition) for one in partitions)
        if tps:
            self._calling(lambda: self._rebalances.revoked(tps, lost=lost))
        for tp in tps:
            for of in (self._begun, self._seeking, self._asked):
                of.pop(tp, None)
        self._inbox.left(tps)
        if self._incremental:
            consumer.incremental_unassign([ck.TopicPartition(*tp) for tp in sorted(tps)])
        else:
            consumer.unassign()

    def _calling(self, work: Callable[[], Any]) -> Any:
        """Keep an error for :meth:`poll`: librdkafka must not see it."""
        try:
            return work()
        except BaseException as error:
            self._failure = self._failure or error
            return None

    # -- errors ----------------------------------------------------------------------------

    def _raise(self, polled: PollResult) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._error_state.final is not None:
            raise self._error_state.final
        for error in polled.errors:
            raise self._meaning(error)
        for tp, offset in polled.unreadable.items():  # which librdkafka repeats
            if tp not in polled.messages:
                raise unreadable(tp, offset, self._kafka)

    def _meaning(self, error: KafkaError) -> OncelyError:
        """An error of the group by its consequence."""
        code, said = _code(error), f"{self._brokers}: {error.str()}"
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return ConfigError(
                "worker.group",
                f"no right to read in group {self._membership.group!r}: {said}",
                way_out="grant this user Read and Describe on the group",
            )
        if code == KafkaError.FENCED_INSTANCE_ID:
            return InstanceTaken(self._membership.group, self._membership.instance or "")
        if code == KafkaError.UNRELEASED_INSTANCE_ID:
            return ConfigError(
                "worker.instance",
                f"{self._membership.instance!r} is still a member of the group: {said}",
                way_out="stop the other process, or wait for the end of its session",
            )
        if code in _UNSUPPORTED:
            return ConfigError(
                "worker.protocol",
                f"the broker does not support {self._membership.protocol!r}: {said}",
                way_out='use a broker of version 4.0 or later, or protocol = "cooperative"',
            )
        return classify_error(error, self._doing, self._brokers)


def _code(error: KafkaError) -> int:
    """The code of an error; of the end of a consumer that of its reason, which is in the text."""
    if error.code() == KafkaError._FATAL:
        for code in (*_OF_THE_GROUP, *_UNSUPPORTED):
            if KafkaError(code).str() in error.str():
                return int(code)
    return int(error.code())


def _pipeline(client: str) -> str:
    return client.removeprefix(WORKER).partition("/")[0]


def _marked(error: KafkaError | None, _: Any) -> None:
    if error is not None:
        log.debug("positions were not marked: %s", error.str())
