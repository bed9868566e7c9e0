"""Topics: ids, bounds and settings, the limits of their cluster, and the reader of compacted ones.

A partition of a compacted topic is read from its first offset to its end, and incrementally after
that. There are two kinds of ends. As committed readers see it now, the log ends at the last stable
offset: an open transaction hides all messages from its first record on. Settled means everything
that was in the log at the time of the request: such a reader waits for the end of every transaction
that was open then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import ConfigError, TableMismatch, Unavailable
from oncely.kafka.client import KafkaAdmin, classify_error, stay_connected
from oncely.threads import tries

SEGMENTS: Mapping[str, str] = {"segment.bytes": str(64 * 1024 * 1024)}
"""Settings of topics that are read from their first offset. The newest segment is never
compacted: with the default of 1 GiB a new reader would read millions of superseded records."""

LEDGER_PARTITIONS = 16
"""Partitions of a new ledger topic: an open transaction of one pipeline hides messages of the
pipelines with the same partition only."""

_COMPACT = "compact"
_AGAIN = 0.02  # seconds
_LEADER_SECONDS = 15.0
_LARGEST = "max.message.bytes"
_ANY_AGE = 2**63 - 1  # ms; the broker's value for no bound
_MIN_INSYNC = "min.insync.replicas"


def described(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, int]:
    """The number of partitions of each topic that exists."""
    return {name: len(one.partitions) for name, one in _descriptions(admin, names).items()}


def identified(admin: KafkaAdmin, name: str) -> tuple[str, int] | None:
    """A topic's id and its number of partitions; None if it does not exist."""
    found = _descriptions(admin, [name]).get(name)
    return None if found is None else (str(found.topic_id), len(found.partitions))


def ids(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, str | None]:
    """The ids of topics; None for a topic that does not exist."""
    wanted = sorted(set(names))
    found = _descriptions(admin, wanted) if wanted else {}
    return {name: str(found[name].topic_id) if name in found else None for name in wanted}


def offsets(
    admin: KafkaAdmin,
    doing: str,
    wanted: Mapping[TopicPartition, OffsetSpec],
    *,
    committed: bool = True,
) -> dict[TopicPartition, Position]:
    """An offset of each partition; the latest one is the last stable offset.

    Args:
        admin: the cluster.
        doing: the operation, for messages.
        wanted: which offset; none: nothing is requested.
        committed: False: the latest offset is the high watermark.
    """
    found = listed_offsets(admin, doing, wanted, committed=committed)
    return {tp: int(one.offset) for tp, one in found.items()}


def listed_offsets(
    admin: KafkaAdmin, doing: str, wanted: Mapping[TopicPartition, OffsetSpec], *, committed: bool
) -> dict[TopicPartition, Any]:
    """The answers of :func:`offsets`, with leader epochs and timestamps."""
    request = {ck.TopicPartition(*tp): spec for tp, spec in wanted.items()}
    if not request:
        return {}
    level = ck.IsolationLevel.READ_COMMITTED if committed else ck.IsolationLevel.READ_UNCOMMITTED
    answers = admin.one(
        doing,
        lambda client, wait: client.list_offsets(
            request, isolation_level=level, request_timeout=wait
        ),
    )
    return {TopicPartition(tp.topic, tp.partition): one for tp, one in answers.items()}


def _descriptions(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, Any]:
    wanted = ck.TopicCollection(sorted(set(names)))
    answers = admin.ask(
        "describe the sink's topics",
        lambda client, wait: client.describe_topics(wanted, request_timeout=wait),
    )
    found: dict[str, Any] = {}
    for name, answer in answers.items():
        if isinstance(answer, KafkaException) and answer.args[0].code() in (
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError.TOPIC_EXCEPTION,
        ):
            continue
        if isinstance(answer, Exception):
            raise admin.sorted(answer, "describe the sink's topics")
        found[name] = answer
    return found


def configured(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The configuration of topics that exist."""
    return {
        name: {key: str(entry.value) for key, entry in entries.items()}
        for name, entries in _config_entries(admin, names).items()
    }


def _config_entries(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, dict[str, ConfigEntry]]:
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in sorted(set(names))]
    if not resources:
        return {}
    answers = admin.one(
        "describe the sink's topics",
        lambda client, wait: client.describe_configs(resources, request_timeout=wait),
    )
    return {resource.name: answer for resource, answer in answers.items()}


def compacted(admin: KafkaAdmin, names: Iterable[str]) -> list[str]:
    """The existing topics among ``names`` that are compacted."""
    found = configured(admin, names)
    return [name for name in sorted(found) if _COMPACT in found[name]["cleanup.policy"]]


class TopicLimits(NamedTuple):
    """The records that the broker accepts in a topic.

    Attributes:
        size: ``max.message.bytes``: the limit of a batch, and so of a record.
        keyed: True for a compacted topic: each record needs a key.
        past, future: ``message.timestamp.before.max.ms`` and ``message.timestamp.after.max.ms``:
            the distance of a record's timestamp from the broker's clock.
    """

    size: int
    keyed: bool = False
    past: int = _ANY_AGE
    future: int = _ANY_AGE


def topic_limits(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, TopicLimits]:
    """The limits of topics that exist."""
    return {name: _limits(config) for name, config in configured(admin, names).items()}


def _limits(config: Mapping[str, str]) -> TopicLimits:
    size, keyed = int(config[_LARGEST]), _COMPACT in config["cleanup.policy"]
    if config["message.timestamp.type"] == "LogAppendTime":
        return TopicLimits(size, keyed)
    # Brokers before Kafka 4 have one bound for both, which one of the other two replaces.
    both = int(config.get("message.timestamp.difference.max.ms", _ANY_AGE))
    bounds = (
        int(config.get(f"message.timestamp.{one}.max.ms", both)) for one in ("before", "after")
    )
    return TopicLimits(size, keyed, *(both if one == _ANY_AGE else one for one in bounds))


def largest_batch(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, int]:
    """``max.message.bytes`` of each topic."""
    return {name: one.size for name, one in topic_limits(admin, names).items()}


def missing(admin: KafkaAdmin, names: Iterable[str]) -> list[str]:
    """The topics among ``names`` that do not exist."""
    wanted = sorted(set(names))
    there = described(admin, wanted)
    return [name for name in wanted if name not in there]


class Layout(NamedTuple):
    """The copies of a topic: partitions, replicas of each, and replicas that must have a record
    before it is acknowledged. None: not known."""

    partitions: int | None
    replicas: int | None
    min_insync: int | None


def layouts(admin: KafkaAdmin, names: Iterable[str]) -> dict[str, Layout]:
    """The layout of topics that exist."""
    found = _descriptions(admin, names)
    config = configured(admin, found)
    return {
        name: Layout(
            len(one.partitions),
            min(len(part.replicas) for part in one.partitions),
            int(config[name][_MIN_INSYNC]),
        )
        for name, one in found.items()
    }


def default_layout(admin: KafkaAdmin) -> Layout:
    """The layout of topics that are created without one, as one of the brokers is configured."""
    doing = "describe the defaults of new topics"
    cluster = admin.one(
        doing, lambda client, wait: {"": client.describe_cluster(request_timeout=wait)}
    )[""]
    broker = [ConfigResource(ResourceType.BROKER, str(cluster.nodes[0].id))]
    (entries,) = admin.one(
        doing, lambda client, wait: client.describe_configs(broker, request_timeout=wait)
    ).values()
    keys = "num.partitions", "default.replication.factor", _MIN_INSYNC
    values = (entries[key].value if key in entries else None for key in keys)
    return Layout(*(None if value is None else int(value) for value in values))


def require_topics(
    admin: KafkaAdmin,
    names: Iterable[str],
    *,
    create: bool = False,
    partitions: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Check the sink's topics; missing ones are created with the broker's defaults.

    Args:
        admin: a client of the cluster.
        names: the topics.
        create: create missing topics.
        partitions: called when a topic is created: the partitions of topics that do not have the
            broker's default.

    Raises:
        TableMismatch: topics are missing and ``create`` is false; the error names them.
    """
    absent = missing(admin, names)
    if not absent:
        return
    if not create:
        raise TableMismatch(
            f"no such topic to write to: {', '.join(map(repr, absent))}",
            way_out="create it, or correct sink.topic and sink.rejects_topic",
        )
    given = partitions()
    for name in absent:
        _create(admin, NewTopic(name, given.get(name, -1), -1))  # -1: the broker's (KIP-464)
    for name in absent:
        _await_leader(admin, name)


def require_ledger(admin: KafkaAdmin, name: str, *, create: bool) -> None:
    """Check the ledger topic, or create it.

    At least :data:`LEDGER_PARTITIONS`, of which a pipeline uses one: its positions need one order.
    Compacted, because positions must not expire.

    Raises:
        TableMismatch: it is missing and ``create`` is false, or it is unsuitable.
    """
    found = find_compacted(admin, name, LEDGER_PARTITIONS, config=SEGMENTS if create else None)
    if found is None:
        raise TableMismatch(
            f"sink.create is false and the ledger topic {name!r} is missing",
            way_out=f"create it with {LEDGER_PARTITIONS} partitions and cleanup.policy=compact",
        )
    require_partitions(name, found.partitions)
    if not found.is_compacted:
        raise TableMismatch(
            f"the ledger topic {name!r} has cleanup.policy {found.policy!r}; it needs {_COMPACT!r}:"
            " positions must not be deleted by age",
            way_out="use another topic, or correct this one before positions are lost",
        )


def require_partitions(name: str, partitions: int) -> None:
    """Refuse a ledger topic with fewer than :data:`LEDGER_PARTITIONS`.

    Raises:
        TableMismatch: it has fewer.
    """
    if partitions < LEDGER_PARTITIONS:
        old = ": versions of Oncely before 0.1.0 have made it so" if partitions == 1 else ""
        raise TableMismatch(
            f"the ledger topic {name!r} has {partitions} of the {LEDGER_PARTITIONS} partitions that"
            f" it needs{old}",
            way_out="name another topic in sink.ledger_topic (docs/worker.md): partitions that are"
            " added to this one do not move its records",
        )


def ledger_partition(pipeline: str) -> int:
    """The partition of a pipeline in a ledger topic."""
    return zlib.crc32(pipeline.encode()) % LEDGER_PARTITIONS


class CompactedTopic(NamedTuple):
    """Properties of a topic that should be compacted, never deleted by age."""

    topic_id: str
    partitions: int
    policy: str

    @property
    def is_compacted(self) -> bool:
        """True if nothing is deleted by age."""
        return self.policy == _COMPACT


def find_compacted(
    admin: KafkaAdmin, name: str, partitions: int = 1, *, config: Mapping[str, str] | None
) -> CompactedTopic | None:
    """Describe a topic that should be compacted.

    Args:
        partitions: of a topic that is created.
        config: settings for creating a missing topic, besides its cleanup policy and the cluster's
            default replication; None: do not create it.

    Returns:
        The topic's properties, suitable or not; None if it is missing.
    """
    if name not in described(admin, [name]):
        if config is None:
            return None
        config = {"cleanup.policy": _COMPACT, **config}
        made = _create(admin, NewTopic(name, partitions, -1, config=config))
        _await_leader(admin, name, partitions if made else 1)
    found = identified(admin, name)
    if found is None:
        raise Unavailable(f"topic {name!r} was deleted during the check")
    policy = configured(admin, [name])[name]["cleanup.policy"]
    return CompactedTopic(*found, policy)


def _await_leader(admin: KafkaAdmin, name: str, partitions: int = 1) -> None:
    """Wait for the leaders of a new topic, without which requests fail.

    Raises:
        Unavailable: a partition has none after 15 seconds.
    """
    here = {ck.TopicPartition(name, one): OffsetSpec.latest() for one in range(partitions)}

    def afresh(client: AdminClient, wait: float) -> Any:
        client.list_topics(name, timeout=wait)  # or the client uses its cached metadata
        return client.list_offsets(here, request_timeout=wait)

    for _ in tries(_LEADER_SECONDS, _AGAIN):
        answer = admin.ask("describe a new topic", afresh)
        if not any(isinstance(one, Exception) for one in answer.values()):
            return
    raise Unavailable(f"topic {name!r} was created and has no leader")


def _create(admin: KafkaAdmin, topic: NewTopic) -> bool:
    """Create a topic; False if another run has created it first."""
    doing = f"create topic {topic.topic!r}"
    answer: Any = admin.ask(
        doing,
        lambda client, wait: client.create_topics(
            [topic], operation_timeout=wait, request_timeout=wait
        ),
    )[topic.topic]
    if not isinstance(answer, Exception):
        return True
    if (
        isinstance(answer, KafkaException)
        and answer.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    ):
        return False
    raise admin.sorted(answer, doing)


TOGETHER = 8
"""Producer instances that a process has open at the same time."""

_KEY = "transaction.max.timeout.ms"
_FILES = 8  # open files of a producer on a cluster of one broker: sockets and pipes
_FILES_PER_BROKER = 3
_OTHER_FILES = 32  # the consumer, the admin client, files that tasks stage


def longest_transaction(admin: KafkaAdmin) -> float | None:
    """The longest timeout that a broker allows, in seconds; None if the query is not permitted.

    Reading a broker's configuration needs DescribeConfigs on the cluster, which a pipeline needs
    for no other purpose: its first transaction reports the limit as well.

    Raises:
        ConfigError: the broker refuses the login.
        Unavailable: no answer.
    """

    def ask(client: Any, wait: float) -> Any:
        # The metadata of all topics would contain the brokers, too, and megabytes.
        broker = client.describe_cluster(request_timeout=wait).result(wait).nodes[0]
        wanted = [ConfigResource(ResourceType.BROKER, str(broker.id))]
        return client.describe_configs(wanted, request_timeout=wait)

    (found,) = admin.ask("read the broker's configuration", ask).values()
    if isinstance(found, Exception) or _KEY not in found:
        return None
    return int(found[_KEY].value) / 1000


def check_timeout(admin: KafkaAdmin, seconds: float) -> None:
    """Refuse a timeout that the broker would refuse.

    Raises:
        ConfigError: ``sink.transaction_timeout`` is longer than the broker allows.
        Unavailable: no answer.
    """
    longest = longest_transaction(admin)
    if longest is not None and seconds > longest:
        raise ConfigError(
            "sink.transaction_timeout",
            f"it is {seconds:g} seconds, and the broker allows {longest:g} at most ({_KEY})",
            way_out=f'write "{longest:g} seconds", or raise it on the brokers',
        )


def check_open_files(admin: KafkaAdmin, producers: int = TOGETHER) -> None:
    """Refuse a limit of open files that so many producers would reach.

    librdkafka reports no error if it cannot open a socket: it retries until the caller's timeout.

    Raises:
        ConfigError: ``ulimit -n`` of this process is too low.
        Unavailable: no answer.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    answer = admin.one(
        "describe the cluster",
        lambda client, wait: {"cluster": client.describe_cluster(request_timeout=wait)},
    )
    each = _FILES + _FILES_PER_BROKER * (len(answer["cluster"].nodes) - 1)
    here = len(os.listdir("/dev/fd"))
    needed = here + producers * each + _OTHER_FILES
    if needed > limit:
        raise ConfigError(
            "ulimit -n",
            f"this process may open {limit} files and needs {needed}: {here} are open, and"
            f" {producers} producers with {each} each write at the same time",
            way_out=f"ulimit -n {max(1024, needed)}; under systemd LimitNOFILE=, in a container"
            " --ulimit nofile=",
        )


_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_MANY, _SIZE = 2_000, 16 << 20  # messages that are taken at once, and their bytes

Mark = tuple[int, bytes]
"""Offset and digest of a message."""


class TopicLog:
    """The progress of one reader. Used by one thread at a time.

    Args:
        topic: its name.
        what: its description in messages, as "the ledger topic".
        admin: returns its first and last offset.
        brokers: for messages.
        timeout: seconds without progress after which a reading fails.
        take: called with every message, in order.
        forget: called if the topic is another one of the same name: all messages so far are void.
        partition: returns its number; after a change of it :meth:`restart` is called.
    """

    def __init__(
        self,
        topic: str,
        what: str,
        admin: KafkaAdmin,
        *,
        brokers: str,
        timeout: float,
        take: Callable[[Any], None],
        forget: Callable[[], None],
        partition: Callable[[], int] = int,
    ) -> None:
        self._topic, self._partition = topic, partition
        self._what, self._admin, self._brokers, self._timeout = what, admin, brokers, timeout
        self._take, self._forget = take, forget
        self.next = 0
        self._last: Any = None
        self._expected: Mark | None = None

    def mark(self) -> Mark | None:
        """The mark of the last message that was taken; None if there was none."""
        return None if self._last is None else (self._last.offset(), _digest(self._last))

    def resume(self, mark: Mark) -> None:
        """Continue from a copy of the messages; ``mark`` is that of the last one.

        The next reading compares it with the log. If it differs, everything is forgotten and read
        from the first offset.
        """
        self.next, self._expected = mark[0], mark

    def bounds(self, *, stable: bool) -> tuple[int, int]:
        """First offset of the topic, and its high watermark or last stable offset."""
        return self._bound(OffsetSpec.earliest(), stable), self._bound(OffsetSpec.latest(), stable)

    def _bound(self, spec: Any, stable: bool) -> int:
        level = ck.IsolationLevel.READ_UNCOMMITTED if stable else ck.IsolationLevel.READ_COMMITTED
        here = ck.TopicPartition(self._topic, self._partition())
        answer = self._admin.one(
            f"read the bounds of {self._what}",
            lambda client, wait: client.list_offsets(
                {here: spec}, isolation_level=level, request_timeout=wait
            ),
        )
        return int(answer[here].offset)

    def read(self, consumer: Callable[[], Any], *, stable: bool) -> None:
        """Read to the end.

        Args:
            consumer: returns a consumer without assignment; called only if there are messages to
                read.
            stable: read all present messages, waiting for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        end = self._bound(OffsetSpec.latest(), stable)
        # Another topic of the same name, or one that has lost its end.
        if end < self.next or (self._expected is not None and end == self.next):
            self.restart()
        if end > self.next and not self._read_to(end, consumer()):
            self.restart()
            self._read_to(end, consumer())

    def restart(self) -> None:
        """Forget all messages so far."""
        self._forget()
        self.next, self._last, self._expected = 0, None, None

    def _read_to(self, end: int, consumer: Any) -> bool:
        """Read to an offset; False if the messages so far are not from this log."""
        from oncely.kafka.inbox import Inbox  # not for status

        if not self.next:
            # This also returns the topic's leader. A client that is connected already looks for the
            # leader of a new topic only once a second.
            with contextlib.suppress(ck.KafkaException):
                stay_connected(consumer, self._topic, self._timeout)
        here = TopicPartition(self._topic, self._partition())
        consumer.assign([ck.TopicPartition(*here, self.next)])
        inbox, deadline = Inbox(consumer, _MANY, _SIZE), time.monotonic() + self._timeout
        try:
            while self.next < end:
                polled = inbox.poll(_STEP)
                for error in [*polled.errors, *polled.failed.values()]:
                    raise classify_error(error, f"read {self._what}", self._brokers)
                if here in polled.messages or here in polled.ends:
                    if not self._received(polled.messages.get(here, ()), end):
                        return False
                    # Behind the last message there may be a marker; messages behind the end were
                    # not taken.
                    self.next = max(self.next, min(end, polled.ends.get(here, 0)))
                    deadline = time.monotonic() + self._timeout
                elif time.monotonic() > deadline:
                    raise self._silent()
        finally:
            consumer.unassign()
        return True

    def _received(self, messages: Sequence[Any], end: int) -> bool:
        """Take messages up to an offset; False if they contradict those before.

        A message behind the end belongs to a transaction that has ended since the end was asked.
        With a part of its messages the log would be in a state that it never had.
        """
        if self._differs(messages):
            return False
        for message in messages:
            if message.offset() >= end:
                self.next = end
                break
            self._take(message)
            self._last = message
            self.next = message.offset() + 1
        return True

    def _differs(self, messages: Sequence[Any]) -> bool:
        """True if what comes first after :meth:`resume` contradicts the mark."""
        expected, self._expected = self._expected, None
        if expected is None:
            return False
        if not messages:  # the end of the log
            return True
        message = messages[0]
        # A later offset: the message was compacted away, because its key has a newer one.
        return bool(message.offset() == expected[0] and _digest(message) != expected[1])

    def _silent(self) -> Unavailable:
        return Unavailable(
            f"read {self._what} {self._topic!r}: an open transaction"
            f" or a silent broker hides the messages from offset {self.next} on",
            way_out="the transaction ends by its timeout, at the latest, and the broker's next look"
            " for expired ones (10 s); pipelines with a sink.ledger_topic of their own, or with"
            " another partition of it, do not wait for each other: docs/worker.md",
        )


def _digest(message: Any) -> bytes:
    """Digest of key, value and time: another message at the same offset would have a different
    one."""
    found = hashlib.sha256()
    for part in (message.key(), message.value(), repr(message.timestamp()).encode()):
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.digest()
