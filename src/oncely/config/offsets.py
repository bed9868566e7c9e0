"""``[offsets]``: the store of the positions, if it is not the sink's own ledger."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from oncely.config import urls
from oncely.config.base import Section, Table, file_name, filled, invalid, quoted, shown
from oncely.config.source import broker_list
from oncely.stores.offsets.base import SQL_TABLE
from oncely.stores.sql.connection import TableName

_NODES = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[^/\0]+)+")
_REDIS = re.compile(r"(?:rediss?://[^/?#\s]+(?:/\d*)?|unix://\S*?/[^?#\s]+)(?:\?[^#\s]*)?")
_REDIS_WAY = 'write "redis://user:${PASSWORD}@host:6379/0", or rediss:// for TLS'


class LedgerOffsets(Section):
    """``[offsets]`` with ``store = "ledger"``: positions are in the sink, beside the rows. The
    default.

    Attributes:
        store: the kind of the store.
    """

    store: Literal["ledger"] = "ledger"

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return False


_group = filled('name a group, or remove it for "oncely-<name>"')


class KafkaOffsets(Section):
    """``[offsets]`` with ``store = "kafka"``: committed offsets on the source's cluster.

    Attributes:
        store: the kind of the store.
        group: the consumer group; by default ``oncely-<name>``.
    """

    store: Literal["kafka"]
    group: Annotated[str, AfterValidator(_group)] | None = None

    def group_of(self, pipeline: str) -> str:
        """The consumer group of a pipeline."""
        return self.group or f"oncely-{pipeline}"

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return False


def _directory(value: Path) -> Path:
    if value.exists() and not value.is_dir():
        raise invalid(
            f"{shown(str(value))} is a file; each pipeline has a file of its own in a directory",
            "name a directory; it is made when it is missing",
        )
    return value


class FileOffsets(Section):
    """``[offsets]`` with ``store = "file"``: a JSON file on one machine.

    Attributes:
        store: the kind of the store.
        path: the directory with one file for each pipeline; relative to the folder of the pipeline
            file.
    """

    store: Literal["file"]
    path: Annotated[
        Path,
        BeforeValidator(file_name),
        AfterValidator(_directory),
        PlainSerializer(str, when_used="json"),
    ]

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return True


class SqlOffsets(Section):
    """``[offsets]`` with ``store = "sql"``: a table in PostgreSQL or SQLite.

    Attributes:
        store: the kind of the store.
        url: URL of the database; its password is never shown.
        table: the table, or schema.table, of the positions; created if it is missing.
    """

    store: Literal["sql"]
    url: urls.Url
    table: Table = SQL_TABLE

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return urls.dialect(self.url.get_secret_value()) == "sqlite"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        url = self.url.get_secret_value()
        try:
            dialect = urls.dialect(url)
        except ValueError as error:
            problem = error.context["problems"][0]  # type: ignore[attr-defined]
            raise invalid(problem.text, problem.way_out, below="url") from None
        if dialect == "sqlite" and self.table.schema not in (None, "main"):
            raise invalid(
                f"SQLite has no schema {shown(self.table.schema)}",
                f"write {quoted(TableName(None, self.table.name))}",
                below="table",
            )
        return self


class RedisOffsets(Section):
    """``[offsets]`` with ``store = "redis"``: a hash in Redis.

    Attributes:
        store: the kind of the store.
        url: URL of the server; its password is never shown.
    """

    store: Literal["redis"]
    url: urls.Url

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return self.url.get_secret_value().startswith("unix:")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        url = self.url.get_secret_value()
        if not _REDIS.fullmatch(url) or "@" in url.rpartition("@")[0]:
            raise invalid(
                "not a URL of Redis; allowed: redis://, rediss://, unix://",
                f"{_REDIS_WAY}; in user and password write @ as %40, / as %2F, ? as %3F",
                below="url",
            )
        return self


def _hosts(value: str) -> str:
    return broker_list(value, 'write "zk-1:2181,zk-2:2181,zk-3:2181"; a path goes to offsets.path')


def _nodes(value: str) -> str:
    if not _NODES.fullmatch(value) or value.split("/")[1] == "zookeeper":
        raise invalid(
            f"found {shown(value)}; allowed: names after slashes, but not /zookeeper, its own",
            'write "/oncely"',
        )
    return value


class ZooKeeperOffsets(Section):
    """``[offsets]`` with ``store = "zookeeper"``: nodes in ZooKeeper.

    Attributes:
        store: the kind of the store.
        hosts: ``host:port``, separated by commas.
        path: the parent node of the pipelines' nodes; created if it is missing.
    """

    store: Literal["zookeeper"]
    hosts: Annotated[str, AfterValidator(_hosts)]
    path: Annotated[str, AfterValidator(_nodes)] = "/oncely"

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return False


OffsetsSettings = Annotated[
    LedgerOffsets | KafkaOffsets | FileOffsets | SqlOffsets | RedisOffsets | ZooKeeperOffsets,
    Field(discriminator="store"),
]
