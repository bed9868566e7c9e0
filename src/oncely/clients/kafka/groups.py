"""The members of a consumer group, as its coordinator describes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.client import KafkaAdmin
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError


class Member(NamedTuple):
    """A member of a consumer group.

    Attributes:
        client: its client id.
        host: the address from which it is connected.
        partitions: those that are assigned to it.
    """

    client: str
    host: str
    partitions: tuple[TopicPartition, ...]

    @classmethod
    def of(cls, described: Any) -> Member:
        """The member of a description."""
        assigned = described.assignment.topic_partitions if described.assignment else ()
        partitions = sorted(TopicPartition(one.topic, one.partition) for one in assigned)
        return cls(described.client_id, described.host.removeprefix("/"), tuple(partitions))


def members(admin: KafkaAdmin, group: str) -> Collection[Any]:
    """The members of a group, as described; none if there is no such group.

    Raises:
        ConfigError: ``worker.group``, the broker denies it; or it refuses the client.
        Unavailable: no answer.
    """
    doing = f"describe group {group!r}"
    answer = admin.ask(
        doing, lambda client, wait: client.describe_consumer_groups([group], request_timeout=wait)
    )[group]
    if not isinstance(answer, Exception):
        found: Collection[Any] = answer.members
        return found
    code = answer.args[0].code() if isinstance(answer, KafkaException) else None
    if code == KafkaError.GROUP_ID_NOT_FOUND:
        return ()
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise ConfigError(
            "worker.group",
            f"no right to describe group {group!r}: {answer}",
            way_out="grant this user Describe on the group",
        ) from answer
    raise admin.sorted(answer, doing) from answer
