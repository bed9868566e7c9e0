"""``[worker]``: the consumer group of `oncely work`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from oncely.config.base import Section
from oncely.config.values import between, filled, parse_seconds

_named = filled("name it, or remove it")
_session = between(
    parse_seconds,
    1,
    3600,
    "1 second to 1 hour",
    'write "45 seconds"; the broker has limits of its own (group.min.session.timeout.ms)',
)


class WorkerSettings(Section):
    """``[worker]``: how the processes of `oncely work` share the partitions.

    Attributes:
        group: the consumer group; by default that of ``source.group``, or ``oncely-<name>``.
        protocol: the protocol of its rebalances: ``eager`` and ``cooperative`` are those of all
            brokers, ``consumer`` is KIP-848 and needs brokers of version 4.0 or later.
        instance: the name of a static member (KIP-345); different in each process.
        session_timeout: the time after which a silent member loses its partitions; by default that
            of the client, 45 seconds. With ``consumer`` the broker decides.
        revoke_timeout: the time for which the commit in hand is awaited when partitions are
            revoked.
        on_rebalance: ``keep``: partitions that stay with the member go on undisturbed. ``restart``:
            what is in memory of all partitions is committed, within ``revoke_timeout``, and those
            that stay begin again.
        max_records: of a commit.
    """

    group: Annotated[str, AfterValidator(_named)] | None = None
    protocol: Literal["eager", "cooperative", "consumer"] = "cooperative"
    instance: Annotated[str, AfterValidator(_named)] | None = None
    session_timeout: Annotated[float, BeforeValidator(_session)] | None = None
    revoke_timeout: Annotated[float, BeforeValidator(_session)] = 10.0
    on_rebalance: Literal["keep", "restart"] = "keep"
    max_records: Annotated[int, Field(ge=1, le=1_000_000)] = 100_000
