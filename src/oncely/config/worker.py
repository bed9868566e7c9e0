"""``[worker]``: the consumer group of `oncely work`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from oncely.config.base import Section, between, filled, parse_seconds, parse_size

_named = filled("name it, or remove it")
LONGEST_SESSION = 300.0
"""Seconds; librdkafka refuses more than the longest time between two polls."""

_session = between(
    parse_seconds,
    1,
    LONGEST_SESSION,
    "1 second to 5 minutes, within which a member polls (max.poll.interval.ms)",
    'write "10 seconds"; the broker has limits of its own (group.min.session.timeout.ms)',
)
_revoke = between(parse_seconds, 1, 3600, "1 second to 1 hour", 'write "10 seconds"')
_memory = between(parse_size, 32 << 20, 8 << 30, "32 MiB to 8 GiB", 'write "256 MiB"')

_patience = between(
    parse_seconds,
    1,
    86_400,
    "1 second to 24 hours",
    'write "5 minutes"; the process then ends with exit code 1, for its supervisor to start it',
)


class WorkerSettings(Section):
    """``[worker]``: how the processes of `oncely work` share the partitions.

    Attributes:
        group: the consumer group; by default that of ``source.group``, or ``oncely-<name>``.
        protocol: the protocol of its rebalances: ``eager`` and ``cooperative`` are those of all
            brokers, ``consumer`` is KIP-848 and needs brokers of version 4.0 or later.
        instance: the name of a static member (KIP-345); different in each process, and the same
            after its restart.
        session_timeout: the time after which a silent member loses its partitions. With
            ``consumer`` the broker decides.
        revoke_timeout: the time for which the commit in hand is awaited when partitions are
            revoked.
        on_rebalance: ``keep``: partitions that stay with the member go on undisturbed. ``restart``:
            what is in memory of all partitions is committed, within ``revoke_timeout``, and those
            that stay begin again.
        patience: the time of errors without a commit, after which the process ends with exit
            code 1.
        max_records: of a commit.
        buffer: the records in memory of the process: fetched, buffered and being committed.
    """

    group: Annotated[str, AfterValidator(_named)] | None = None
    protocol: Literal["eager", "cooperative", "consumer"] = "cooperative"
    instance: Annotated[str, AfterValidator(_named)] | None = None
    session_timeout: Annotated[float, BeforeValidator(_session)] = 10.0
    revoke_timeout: Annotated[float, BeforeValidator(_revoke)] = 10.0
    on_rebalance: Literal["keep", "restart"] = "keep"
    patience: Annotated[float, BeforeValidator(_patience)] = 300.0
    max_records: Annotated[int, Field(ge=1, le=1_000_000)] = 100_000
    buffer: Annotated[int, BeforeValidator(_memory)] = 256 << 20
