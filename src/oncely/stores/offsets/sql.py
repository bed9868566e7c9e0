"""Positions in a table of PostgreSQL or SQLite: one row for each topic-partition.

Any database will do, also that of the sink. The table is not the sink's ledger: rows and positions
are written in separate transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, OncelyError, Stopped, TableMismatch, Unavailable, WrongInput
from oncely.per_process import PerProcess
from oncely.stores.offsets.base import SQL_TABLE, OffsetStore, StoredPosition, checked
from oncely.stores.sql.connection import (
    BadData,
    Connection,
    Dialect,
    TableName,
    connect,
    transaction,
)
from oncely.stores.sql.dialects import dialect_for

T = TypeVar("T")

_DDL = """CREATE TABLE IF NOT EXISTS {table} (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "position" BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    cluster_id TEXT NOT NULL,
    topic_id TEXT NOT NULL,
    PRIMARY KEY (pipeline, topic, "partition")
)"""
_COLUMNS = ("pipeline", "topic", "partition", "position", "epoch", "cluster_id", "topic_id")
_SELECT = """SELECT topic, "partition", "position", epoch, cluster_id, topic_id
    FROM {table} WHERE pipeline = %s"""
_UPSERT = """INSERT INTO {table}
    (pipeline, topic, "partition", "position", epoch, cluster_id, topic_id)
    VALUES (%s, %s, %s, %s, %s, %s, %s)
    ON CONFLICT (pipeline, topic, "partition") DO UPDATE SET "position" = excluded."position",
    epoch = excluded.epoch, cluster_id = excluded.cluster_id, topic_id = excluded.topic_id"""


class SqlStore(OffsetStore):
    """Keeps positions in a table, created at the first save if it is missing.

    Args:
        url: ``postgresql://…`` or ``sqlite:///…``, as for the SQL sink.
        pipeline: the name of the pipeline.
        table: its name.
        timeout: seconds to wait for a connection.

    Raises:
        ConfigError: no such kind of database (``offsets.url``).
    """

    def __init__(
        self, url: str, pipeline: str, table: TableName = SQL_TABLE, timeout: float = 10.0
    ) -> None:
        self.pipeline, self.table = pipeline, table
        try:
            self._dialect = dialect_for(url, timeout)
        except WrongInput as error:
            raise _for_offsets(error) from None
        self._session: PerProcess[Connection] = PerProcess(partial(_connect, self._dialect), _end)
        self._ready = False

    def __repr__(self) -> str:
        return f"SqlStore({self.where!r}, {self.pipeline!r})"

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_ready": False}

    @property
    def where(self) -> str:
        """Database and table."""
        return f"{self._dialect.endpoint}, table {self.table}"

    def load(self) -> dict[TopicPartition, StoredPosition]:
        """See :meth:`OffsetStore.load`."""
        if self._dialect.name == "sqlite" and not Path(self._dialect.endpoint).exists():
            return {}
        return self._ask(self._read)

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        """See :meth:`OffsetStore.save`. In one transaction."""
        if positions:
            self._ask(lambda connection: self._write(connection, positions), create=True)

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def _read(self, connection: Connection) -> dict[TopicPartition, StoredPosition]:
        if not self._exists(connection):
            return {}
        return {
            TopicPartition(topic, number): checked(
                StoredPosition(*rest), self.where, f"{topic}/{number}"
            )
            for topic, number, *rest in connection.query(self._sql(_SELECT), (self.pipeline,))
        }

    def _write(
        self, connection: Connection, positions: Mapping[TopicPartition, StoredPosition]
    ) -> None:
        if not self._ready and not self._exists(connection):
            with transaction(connection):
                self._dialect.lock_for_setup(connection)
                connection.execute(self._dialect.translate(self._sql(_DDL)))
        self._ready = True
        # Sorted: all processes lock rows in the same order.
        rows = [
            (self.pipeline, *tp, one.position, one.epoch, one.cluster_id, one.topic_id)
            for tp, one in sorted(positions.items())
        ]
        with transaction(connection):
            connection.execute_many(self._sql(_UPSERT), rows)

    def _exists(self, connection: Connection) -> bool:
        """True if the table exists.

        Raises:
            ConfigError: a table of this name exists that has other columns.
        """
        found = [column.name for column in self._dialect.columns(connection, self.table)]
        if found and sorted(found) != sorted(_COLUMNS):
            raise ConfigError(
                "offsets.table",
                f"{self.where} exists, and is not a table of positions",
                way_out="name another one, which is created",
            )
        return bool(found)

    def _create_database(self) -> None:
        """Create SQLite's file; PostgreSQL's databases are created by an administrator."""
        try:
            self._dialect.create_database()
        except WrongInput:
            # Of several processes that create it at once only one succeeds; the others find it
            # locked, and existing.
            if not Path(self._dialect.endpoint).exists():
                raise

    def _sql(self, template: str) -> str:
        name = ".".join(self._dialect.quote(part) for part in self.table if part)
        return template.format(table=name)

    def _ask(self, work: Callable[[Connection], T], *, create: bool = False) -> T:
        try:
            if create:
                self._create_database()
            with self._session.use() as connection:
                return work(connection)
        except BadData as error:
            raise Stopped(
                f"{self.where} refuses a position: {error.reason}",
                way_out="look for a constraint or a trigger on the table",
            ) from None
        except WrongInput as error:
            self._ready = False
            raise _for_offsets(error) from None
        except Unavailable as error:
            raise Unavailable(f"{self.where}: {error.message}", way_out=_AWAY) from None


_AWAY = "is the database running, and is offsets.url right?"
_WAY = "check user, password, database and the user's grants on offsets.table"


def _for_offsets(error: WrongInput) -> OncelyError:
    """Adapt the error: the database client names keys of the sink."""
    section, _, key = error.key.partition(".")
    if section == "offsets":
        return error
    if isinstance(error, ConfigError):
        return ConfigError("offsets.url", error.problem, way_out=error.way_out)
    if not key:  # an error of a statement: a file may be no database, else it is about the table
        file = error.message.startswith("SQLite") and not isinstance(error, TableMismatch)
        key = "url" if file else "table"
    return ConfigError(f"offsets.{key}", error.problem, way_out=_WAY)


def _connect(dialect: Dialect) -> Connection:
    return connect(dialect, "oncely-offsets")


def _end(connection: Connection) -> None:
    connection.close()
