"""``[sink]``: the table, and the handling of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, SecretStr, model_validator

from oncely.config import urls
from oncely.config.base import (
    Budget,
    Problem,
    Rounding,
    Section,
    Table,
    all_invalid,
    as_tuple,
    folded,
    invalid,
    parse_budget,
    parse_seconds,
    quoted,
    shown,
)
from oncely.stores.sql.connection import LONGEST_NAME, TableName
from oncely.stores.sql.tables import TABLES


class SqlSinkSettings(Section):
    """``[sink]`` with ``kind = "sql"``: a table in PostgreSQL or SQLite.

    Attributes:
        kind: the kind of the destination.
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
        max_rejects: the reject budget, beyond which the pipeline stops; counted across restarts.
            ``"100%"`` never stops it.
        connect_timeout: the time to wait for a connection.
    """

    kind: Literal["sql"]
    url: SecretStr
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
        return urls.dialect(self.url.get_secret_value())

    @property
    def url_for_display(self) -> str:
        """The URL with its password, and other secrets of the file, replaced by ``***``."""
        return self.secrets.redact(urls.without_password(self.url.get_secret_value()))

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


def upsert_problems(mode: str, keys: tuple[str, ...], version: str | None) -> list[Problem]:
    """Keys and version that don't go with the mode."""
    found = []
    if mode == "upsert" and not keys:
        found.append(Problem("keys", "is missing; an upsert finds its row by them",
                             'name the columns: keys = ["id"]'))  # fmt: skip
    if mode == "append":
        given = {"keys": keys, "version": version}
        found += [
            Problem(name, 'has no meaning with mode = "append"', 'remove it, or mode = "upsert"')
            for name, value in given.items()
            if value
        ]
    if len(set(keys)) != len(keys):
        found.append(Problem("keys", "names a column more than once", "name each column once"))
    if version is not None and version in keys:
        found.append(Problem("version", "is one of the keys, so it never differs",
                             "name a column that grows with each change"))  # fmt: skip
    return found
