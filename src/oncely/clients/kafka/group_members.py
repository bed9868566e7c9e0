"""The members of a consumer group, as its coordinator describes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.client import KafkaAdmin
from oncely.errors import ConfigError


def members_of(brokers: str, kafka: Mapping[str, object], group: str) -> int:
    """The number of members of a group; 0 if there is no such group.

    Raises:
        ConfigError: ``worker.group``, the broker denies it; or it refuses the client.
        Unavailable: no answer.
    """
    admin = KafkaAdmin(brokers, kafka, timeout=10.0)
    try:
        return len(members(admin, group))
    finally:
        admin.close()


def members(admin: KafkaAdmin, group: str) -> Collection[Any]:
    """The members of a group, as described; none if there is no such group."""
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
