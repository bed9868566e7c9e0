"""``[sink]`` with ``kind = "sql"``: the table, and the handling of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, model_validator

from oncely.config.base import (
    URL_EXAMPLE,
    Budget,
    Problem,
    Rounding,
    Table,
    Url,
    all_invalid,
    as_tuple,
    dialect_of,
    folded,
    invalid,
    parse_budget,
    parse_seconds,
    quoted,
    shown,
)
from oncely.config.pipeline import PipelineSettings
from oncely.config.sink import SinkSettings, key_problems, server_problems, upsert_problems
from oncely.stores.sql.connection import LONGEST_NAME, TableName
from oncely.stores.sql.tables import TABLES


class SqlSinkSettings(SinkSettings):
    """``[sink]`` with ``kind = "sql"``: a table in PostgreSQL or SQLite.

    Attributes:
        url: URL of the database, ``postgresql://`` or ``sqlite:///``; its password is never shown.
        table: the destination, a table or schema.table; as in SQL, names with capitals are quoted.
        mode: append rows, or upsert them by ``keys``.
        keys: the columns that identify a row in an upsert.
        version: a column that grows with each change: an older row never replaces a newer one.
        create: create the table if it is missing.
        keep_source: also write topic, partition and offset of each row; by default in a table that
            Oncely creates, or that has these columns. Unless it is false, rows must not have
            columns of the same names.
        rounding: ``allow`` values to lose digits that their columns do not keep, also those of
            texts in JSON beyond the microseconds of a TIMESTAMP; else the record is rejected.
        connect_timeout: the time to wait for a connection.
    """

    examples: ClassVar[Mapping[str, str]] = {
        "url": URL_EXAMPLE,
        "table": 'table = "public.flights"',
    }

    kind: Literal["sql"]
    url: Url
    table: Table
    mode: Literal["append", "upsert"] = "append"
    keys: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    version: str | None = None
    create: bool = True
    keep_source: bool | None = None
    rounding: Rounding = "refuse"
    max_rejects: Budget = parse_budget("1%")
    connect_timeout: Annotated[float, BeforeValidator(parse_seconds)] = 10.0

    @property
    def dialect(self) -> Literal["postgresql", "sqlite"]:
        """The kind of database."""
        return dialect_of(self.url.get_secret_value())

    @property
    def target(self) -> str:
        """The table."""
        return str(self.table)

    def problems(self, pipeline: PipelineSettings) -> list[Problem]:
        """What does not go with the rest of the file."""
        found = []
        if self.dialect == "sqlite" and not pipeline.spark.is_local:
            found.append(
                Problem("sink.url", "SQLite is one file on one machine, and spark.master is"
                        f" {pipeline.spark.master}", 'use PostgreSQL, or master = "local[*,4]"')
            )  # fmt: skip
        found += key_problems(pipeline.decode.key, self.mode, self.keys)
        return found + server_problems(pipeline.source, self.url.get_secret_value())

    @model_validator(mode="before")
    @classmethod
    def _unfolded(cls, data: Any) -> Any:
        """Refuse capitals that PostgreSQL would fold to lower case: the name is ambiguous."""
        if isinstance(data, Mapping) and "sqlite" not in str(data.get("url"))[:6]:
            for part in folded(data.get("table")):
                raise invalid(
                    f"PostgreSQL reads {part} as {part.lower()} unless it is quoted",
                    f"write {part.lower()}, or '\"{part}\"' when the table has capitals",
                    below="table",
                )
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            self.dialect  # noqa: B018
        except ValueError as error:
            raise invalid(*_first(error), below="url") from None
        if found := [*_table_problems(self), *upsert_problems(self.mode, self.keys, self.version)]:
            raise all_invalid(found)
        return self


def _first(error: Any) -> tuple[str, str]:
    problem: Problem = error.context["problems"][0]
    return problem.text, problem.way_out


def _table_problems(sink: SqlSinkSettings) -> list[Problem]:
    found = []
    if sink.dialect == "sqlite" and sink.table.schema not in (None, "main"):
        found.append(Problem("table", f"SQLite has no schema {shown(sink.table.schema)}",
                             f"write {quoted(TableName(None, sink.table.name))}"))  # fmt: skip
    long = [p for p in sink.table if p and len(p.encode()) > LONGEST_NAME]
    if sink.dialect == "postgresql" and long:
        found.append(Problem("table", f"PostgreSQL truncates {shown(long[0])} to {LONGEST_NAME} "
        "bytes",
                             "use a shorter name"))  # fmt: skip
    name = sink.table.name.lower() if sink.dialect == "sqlite" else sink.table.name
    if name in TABLES or (sink.dialect == "sqlite" and name.startswith("sqlite_")):
        owner = "Oncely's ledger" if name in TABLES else "SQLite"
        found.append(Problem("table", f"{shown(name)} is a table of {owner} itself",
                             "use another name"))  # fmt: skip
    return found
