"""Permissions of the client, requested from the broker (authorized operations, KIP-430)."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import confluent_kafka as ck

from oncely.clients.kafka.client import KafkaAdmin
from oncely.errors import OncelyError
from oncely.sources.kafka import KafkaSource


class Missing(NamedTuple):
    """A permission that is missing.

    Attributes:
        text: a part of a sentence.
        shows_only: a run works without it, and does not show its position in the group.
    """

    text: str
    shows_only: bool = False


def missing_permissions(source: KafkaSource, group: str | None) -> list[Missing]:
    """Each permission that is missing to read, or to mirror to ``group``.

    If the broker cannot answer, the permissions are assumed: the first read will fail otherwise.

    Raises:
        ConfigError: the broker refuses the client altogether.
        Unavailable: no answer.
    """
    with closing(KafkaAdmin(source.brokers, source.kafka, source.timeout)) as admin:
        return _missing(admin, source, group)


def _missing(admin: KafkaAdmin, source: KafkaSource, group: str | None) -> list[Missing]:
    names = ck.TopicCollection(list(source.topics))
    topics = admin.ask(
        "ask for permissions",
        lambda client, wait: client.describe_topics(
            names, include_authorized_operations=True, request_timeout=wait
        ),
    )
    missing = [
        Missing(f"Read on topic {name!r}") for name, found in topics.items() if not _may_read(found)
    ]
    if group is not None and not _may_read(_group(admin, group)):
        missing.append(Missing(f"Read on group {group!r}, to show the position to lag tools", True))
    return missing


def _group(admin: KafkaAdmin, group: str) -> Any:
    try:
        return admin.ask(
            "ask for permissions",
            lambda client, wait: client.describe_consumer_groups(
                [group], include_authorized_operations=True, request_timeout=wait
            ),
        )[group]
    except OncelyError:  # display only: no reason to refuse a pipeline
        return None


def _may_read(found: Any) -> bool:
    if isinstance(found, Exception):
        code = found.args[0].code() if isinstance(found, ck.KafkaException) else None
        return code not in (
            ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
            ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
        )
    operations = getattr(found, "authorized_operations", None)
    return not operations or any(one.name in ("READ", "ALL") for one in operations)


def needed_acls(source: KafkaSource, group: str | None) -> list[str]:
    """``kafka-acls`` commands that grant exactly the permissions that a pipeline needs."""
    user = source.kafka.get("sasl.username") or "ANONYMOUS"
    head = f"kafka-acls --bootstrap-server {source.brokers} --add --allow-principal User:{user}"
    acls = [f"{head} --operation Read --operation Describe --topic {one}" for one in source.topics]
    if group is not None:
        acls.append(f"{head} --operation Read --group {group}")
    return acls
