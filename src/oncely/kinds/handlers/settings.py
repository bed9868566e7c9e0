"""``[sink]`` with ``kind = "handlers"``: functions of the user, in the database of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from oncely.config.base import (
    TIME,
    URL_EXAMPLE,
    Budget,
    Problem,
    Rounding,
    Url,
    as_tuple,
    filled,
    invalid,
    parse_budget,
    parse_seconds,
    shown,
    written,
)
from oncely.config.pipeline import PipelineSettings
from oncely.config.sink import SinkSettings, server_problems
from oncely.stores.sql.connection import TableName
from oncely.stores.sql.tables import POSITIONS

LONGEST_CALL = 240.0
"""Seconds; members of a group must poll every 300 s (``max.poll.interval.ms``)."""


@written(TIME, "100 ms to 4 minutes")
def _time_limit(value: object) -> float:
    seconds = parse_seconds(value)
    if not 0.1 <= seconds <= LONGEST_CALL:
        raise invalid(
            f"found {shown(value)}; allowed: 100 ms to {LONGEST_CALL:g} seconds, less than the time"
            " after which the group takes partitions away (max.poll.interval.ms)",
            'write "60 seconds"; let the handler do less at once',
        )
    return seconds


_schema = filled("name a schema, or remove it")


def _header_names(value: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name.strip() for name in value):
        raise invalid("has an empty name", "name the headers, or remove it")
    return value


class HandlersSinkSettings(SinkSettings):
    """``[sink]`` with ``kind = "handlers"``: what they write is theirs; the ledger is in ``url``.

    Attributes:
        url: URL of the PostgreSQL database; its password is never shown.
        ledger_schema: the schema of the ledger's tables; by default the connection's first one.
        create: create the ledger's tables if they are missing.
        retries: the number of times that a transaction is repeated after an error of a handler.
        on_error: after the retries: ``reject`` the records at fault, or ``stop``.
        time_limit: the time that a call of a handler may take.
        context: headers that are a record's context, beside those of W3C Trace Context and Baggage.
        connect_timeout: the time to wait for a connection.
    """

    examples: ClassVar[Mapping[str, str]] = {
        "url": URL_EXAMPLE,
        "ledger_schema": 'ledger_schema = "oncely"',
        "context": 'context = ["user", "locale"]',
    }

    kind: Literal["handlers"]
    url: Url
    ledger_schema: Annotated[str, AfterValidator(_schema)] | None = None
    create: bool = True
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    on_error: Literal["reject", "stop"] = "reject"
    time_limit: Annotated[float, BeforeValidator(_time_limit)] = 60.0
    rounding: Rounding = "refuse"
    max_rejects: Budget = parse_budget("1%")
    context: Annotated[
        tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(_header_names)
    ] = ()
    connect_timeout: Annotated[float, BeforeValidator(parse_seconds)] = 10.0

    @property
    def table(self) -> TableName:
        """The ledger's own table, which stands for a table of rows."""
        return TableName(self.ledger_schema, POSITIONS)

    @property
    def target(self) -> str:
        """The table of the ledger."""
        return str(self.table)

    def problems(self, pipeline: PipelineSettings) -> list[Problem]:
        """What does not go with the rest of the file."""
        found = []
        if pipeline.by_spark:
            found.append(
                Problem("transform.spark", "a handler gets records, and a row of a Spark transform "
                        "comes from no single record", "use transform.sql or .python")
            )  # fmt: skip
        if pipeline.delivery != "exactly_once":
            found.append(
                Problem("delivery", f"found {shown(pipeline.delivery)}; what handlers do is "
                        "committed with the positions", "remove it")
            )  # fmt: skip
        return found + server_problems(pipeline.source, self.url.get_secret_value())

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.url.get_secret_value().lower().startswith(("postgresql://", "postgres://")):
            raise invalid(
                "is not the URL of a PostgreSQL database, which handlers need",
                "postgresql://user:password@host:port/database",
                below="url",
            )
        return self
