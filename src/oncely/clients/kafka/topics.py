"""The topics that the sink writes to: the ledger's own, the output, the rejects'."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from oncely.clients.kafka.client import KafkaAdmin
from oncely.errors import OncelyError, TableMismatch, Unavailable

_logger = logging.getLogger("oncely.sinks.kafka")

SEGMENTS: Mapping[str, str] = {"segment.bytes": str(64 * 1024 * 1024)}
"""Of topics that are read from their first offset. The newest segment is never compacted: with the
default of 1 GiB a new reader would read millions of records that were superseded."""

_COMPACT = "compact"
_AGAIN = 0.02  # seconds
_LARGEST = "max.message.bytes"


def described(asker: KafkaAdmin, names: Iterable[str]) -> dict[str, int]:
    """The number of partitions of each topic that exists."""
    return {name: len(one.partitions) for name, one in _descriptions(asker, names).items()}


def identified(asker: KafkaAdmin, name: str) -> tuple[str, int] | None:
    """A topic's id and its number of partitions; None: it is not there."""
    found = _descriptions(asker, [name]).get(name)
    return None if found is None else (str(found.topic_id), len(found.partitions))


def ids(asker: KafkaAdmin, names: Iterable[str]) -> dict[str, str | None]:
    """The ids of topics; None for one that is not there."""
    wanted = sorted(set(names))
    found = _descriptions(asker, wanted) if wanted else {}
    return {name: str(found[name].topic_id) if name in found else None for name in wanted}


def _descriptions(asker: KafkaAdmin, names: Iterable[str]) -> dict[str, Any]:
    wanted = ck.TopicCollection(sorted(set(names)))
    answers = asker.ask(
        "look at the sink's topics",
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
            raise asker.sorted(answer, "look at the sink's topics")
        found[name] = answer
    return found


def configured(asker: KafkaAdmin, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The configuration of topics that exist."""
    return {
        name: {key: str(entry.value) for key, entry in entries.items()}
        for name, entries in _config_entries(asker, names).items()
    }


def _config_entries(asker: KafkaAdmin, names: Iterable[str]) -> dict[str, dict[str, ConfigEntry]]:
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in sorted(set(names))]
    if not resources:
        return {}
    answers = asker.one(
        "look at the sink's topics",
        lambda client, wait: client.describe_configs(resources, request_timeout=wait),
    )
    return {resource.name: answer for resource, answer in answers.items()}


def compacted(asker: KafkaAdmin, names: Iterable[str]) -> list[str]:
    """Those of the topics, all of which exist, that keep the last record of a key."""
    found = configured(asker, names)
    return [name for name in sorted(found) if _COMPACT in found[name]["cleanup.policy"]]


def largest_batch(asker: KafkaAdmin, names: Iterable[str]) -> dict[str, int]:
    """``max.message.bytes`` of each topic: what one batch, and so one record, may have."""
    return {name: int(config[_LARGEST]) for name, config in configured(asker, names).items()}


def missing(asker: KafkaAdmin, names: Iterable[str]) -> list[str]:
    """Those of the topics that are not there."""
    wanted = sorted(set(names))
    there = described(asker, wanted)
    return [name for name in wanted if name not in there]


def require_topics(asker: KafkaAdmin, names: Iterable[str], *, create: bool = False) -> None:
    """Find the topics to write to; missing ones are created as the broker makes topics.

    Raises:
        TableMismatch: missing with ``create`` false, naming the topics.
    """
    absent = missing(asker, names)
    if not absent:
        return
    if not create:
        raise TableMismatch(
            f"no such topic to write to: {', '.join(map(repr, absent))}",
            way_out="create it, or mend sink.topic and sink.rejects_topic",
        )
    for name in absent:
        _create(asker, NewTopic(name, -1, -1))  # the broker's num.partitions (KIP-464)
    for name in absent:
        _await_leader(asker, name)


def require_ledger(asker: KafkaAdmin, name: str, *, create: bool) -> bool:
    """Find the ledger topic, or create it; True when it was created.

    One partition, because a position must not be hidden by another's open transaction for
    longer than one partition's last stable offset can; compacted, because age must not take a
    position away.

    Raises:
        TableMismatch: missing with ``create`` false, or unfit.
    """
    found = find_compacted(asker, name, config=SEGMENTS if create else None)
    if found is None:
        raise TableMismatch(
            f"sink.create is false and the ledger topic {name!r} is missing",
            way_out="create it with one partition and cleanup.policy=compact",
        )
    if not found.fits:
        raise TableMismatch(
            f"the ledger topic {name!r} has {found.partitions} partitions and cleanup.policy"
            f" {found.policy!r}; it needs one partition and {_COMPACT!r}: positions must neither"
            " be scattered nor deleted by age",
            way_out="name another topic, or mend this one before anything is lost",
        )
    if create and not found.made:
        _set_segments(asker, name)
    return found.made


def _set_segments(asker: KafkaAdmin, name: str) -> None:
    """Give a topic the settings of :data:`SEGMENTS` that it was created without.

    Earlier versions created ledger topics with the broker's defaults. A setting of the topic's own
    stays. Without the permission to alter the topic nothing changes, and only starts take longer.
    """
    entries = _config_entries(asker, [name])[name]
    own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    unset = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in SEGMENTS.items()
        if entries[key].source != own and int(entries[key].value) > int(value)
    ]
    if not unset:
        return
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=unset)
    try:
        asker.one(
            f"alter topic {name!r}",
            lambda client, wait: client.incremental_alter_configs([resource], request_timeout=wait),
        )
    except OncelyError as error:
        _logger.info(
            "topic %s keeps its segment.bytes, so starts read more: %s", name, error.message
        )


class OnePartition(NamedTuple):
    """What a topic is that should have one partition and be compacted, never deleted by age."""

    topic_id: str
    partitions: int
    policy: str
    made: bool = False

    @property
    def fits(self) -> bool:
        """Whether it is so."""
        return self.partitions == 1 and self.policy == _COMPACT


def find_compacted(
    asker: KafkaAdmin, name: str, *, config: Mapping[str, str] | None
) -> OnePartition | None:
    """Look at a topic that should have one partition and be compacted.

    Args:
        config: to create it with when it is missing, beside its cleanup policy, and with the
            cluster's own replication; None: leave it missing.

    Returns:
        The topic as it is, whether it fits or not; None when it is missing.
    """
    made = False
    if name not in described(asker, [name]):
        if config is None:
            return None
        made = _create(asker, NewTopic(name, 1, -1, config={"cleanup.policy": _COMPACT, **config}))
        _await_leader(asker, name)
    found = identified(asker, name)
    if found is None:
        raise Unavailable(f"topic {name!r} has gone while it was looked at")
    policy = configured(asker, [name])[name]["cleanup.policy"]
    return OnePartition(*found, policy, made)


def _await_leader(asker: KafkaAdmin, name: str, seconds: float = 15.0) -> None:
    """A topic that was just made has no leader for a moment, and nothing can be asked of it.

    Raises:
        Unavailable: it got none.
    """
    deadline = time.monotonic() + seconds
    here = {ck.TopicPartition(name, 0): OffsetSpec.latest()}

    def afresh(client: AdminClient, wait: float) -> Any:
        client.list_topics(name, timeout=wait)  # or the client goes by what it knew before
        return client.list_offsets(here, request_timeout=wait)

    while True:
        answer = asker.ask("look at a new topic", afresh)
        if not any(isinstance(one, Exception) for one in answer.values()):
            return
        if time.monotonic() > deadline:
            raise Unavailable(f"topic {name!r} was created and has no leader")
        time.sleep(_AGAIN)


def _create(asker: KafkaAdmin, topic: NewTopic) -> bool:
    """Create a topic; False: another run was quicker."""
    doing = f"create topic {topic.topic!r}"
    answer: Any = asker.ask(
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
    raise asker.sorted(answer, doing)
