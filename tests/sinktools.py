"""What tests of the SQL sink share: places to write to, chunks to write, faults to meet.

Places are looked at through the plain drivers, with none of the sink's own code.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import psycopg
import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import Delivery, Outcome, commit
from oncely.commit.run import OpenLedger
from oncely.core.batch import Batch, Chunk, Reject, Rejection
from oncely.core.claim import Claim, Entry, Fence, Opened, Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.errors import Unavailable
from oncely.kinds.base import Sink
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql.table import TableSpec
from oncely.stores.sql.connection import Connect, Connection, Dialect, TableName, connect
from oncely.stores.sql.dialects import dialect_for
from tests import plain_sql

KINDS = ("postgresql", "sqlite")
SOURCE = SourceIdentity("cluster-1", {"t": "id-of-t", "u": "id-of-u"})
T0, T1, T2 = (TopicPartition("t", number) for number in range(3))
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


# -- places --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A schema of PostgreSQL or a file of SQLite that belongs to one test."""

    url: str
    schema: str | None = None
    connect_timeout: float = 10.0

    @property
    def kind(self) -> str:
        return self.url.partition(":")[0]

    @property
    def is_postgres(self) -> bool:
        return self.kind == "postgresql"

    @property
    def dialect(self) -> Dialect:
        return dialect_for(self.url, self.connect_timeout)

    def table(self, name: str = "rows") -> TableName:
        return TableName(self.schema, name)

    def sql(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        """Run one statement (``?`` for a parameter), unqualified names meaning this place."""
        if not self.is_postgres:
            with closing(self.session()) as session:
                return list(session.execute(text, params))
        path = f"-c search_path={self.schema}" if self.schema else None
        return plain_sql.ask(self.url, text.replace("?", "%s") if params else text, params, path)

    def session(self) -> Any:
        """A plain session of the driver, in autocommit."""
        if not self.is_postgres:
            return sqlite3.connect(self.file, isolation_level=None)
        path = {"options": f"-c search_path={self.schema}"} if self.schema else {}
        return psycopg.connect(self.url, autocommit=True, **path)

    @property
    def file(self) -> Path:
        return Path(self.url.removeprefix("sqlite:///"))


def postgres_place(url: str) -> Place:
    """A new schema in the database."""
    schema = f"s{uuid.uuid4().hex[:12]}"
    plain_sql.ask(url, f"CREATE SCHEMA {schema}")
    return Place(url, schema)


@contextmanager
def sqlite_place() -> Iterator[Place]:
    """A file that is not there yet, in memory where that can be: processes die, not machines."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Place(f"sqlite:///{directory}/{uuid.uuid4().hex[:12]}.db")


def trigger(place: Place, body: str, on: str = "BEFORE INSERT ON rows") -> str:
    """A trigger of each row in PL/pgSQL; for PostgreSQL. Returns the name of its function.

    Args:
        body: between ``BEGIN`` and ``END``.
        on: the time, the kind of statement, and the table or view.
    """
    name = f"f{uuid.uuid4().hex[:12]}"
    place.sql(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} END$$")
    function = f"{place.schema}.{name}"
    place.sql(f"CREATE TRIGGER {name} {on} FOR EACH ROW EXECUTE FUNCTION {function}()")
    return name


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# -- sinks ---------------------------------------------------------------------------------


def sink_to(
    place: Place,
    schema: pa.Schema = SCHEMA,
    *,
    table: str = "rows",
    pipeline: str = "p",
    keys: Sequence[str] = (),
    version: str | None = None,
    keep_source: bool = False,
    create: bool = True,
    may_round: bool = False,
    connect: Connect = connect,
) -> SqlSink:
    """A sink as the driver makes it, not opened."""
    if keep_source:
        schema = pa.schema(
            [
                *schema,
                ("kafka_topic", pa.string()),
                ("kafka_partition", pa.int32()),
                ("kafka_offset", pa.int64()),
            ]
        )
    wanted = TableSpec(place.table(table), schema, tuple(keys), version, may_round)
    return SqlSink(pipeline, place.dialect, wanted, keep_source, create, connect=connect)


def open_sink(
    sink: Sink,
    start: Mapping[TopicPartition, int] | None = None,
    source: SourceIdentity = SOURCE,
    expected: int | None = None,
) -> Opened:
    at = {T0: 0} if start is None else start
    return sink.open(Takeover(source, lambda: at, at, expected))


def ready(
    sink: SqlSink, start: Mapping[TopicPartition, int] | None = None
) -> tuple[SqlSink, Fence]:
    """The sink opened and bound, and its fence."""
    fence = open_sink(sink, start).fence
    return sink.bind(), fence


# -- records -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rec:
    """A record and what became of it before the sink: rows, a tombstone, a reject or nothing."""

    offset: int
    rows: Sequence[Mapping[str, object]] = ()
    deletes: Mapping[str, object] | None = None
    bad: str | None = None
    key: bytes | None = b"key"
    value: bytes | None = b"value"
    headers: Sequence[tuple[str, bytes | None]] = field(default_factory=tuple)
    timestamp: int = 1_700_000_000_000


def rec(offset: int, **row: object) -> Rec:
    """A record that became one row."""
    return Rec(offset, (row,))


def gone(offset: int, **key: object) -> Rec:
    """A tombstone of a key."""
    return Rec(offset, deletes=key, value=None)


def numbered(start: int, end: int) -> list[Rec]:
    """Records with offsets ``start <= offset < end``, each a row of :data:`SCHEMA`."""
    return [rec(n, id=n, name=f"name {n}") for n in range(start, end)]


Parts = Mapping[TopicPartition, tuple[int, Sequence[Rec]]]


def chunk(parts: Parts, schema: pa.Schema = SCHEMA, keys: Sequence[str] = ()) -> Chunk:
    """The chunk that a task makes of ``{partition: (where the claim begins, records)}``."""
    partitions = tuple(sorted(parts))
    flat = [(at, one) for at, tp in enumerate(partitions) for one in parts[tp][1]]
    rows = [(i, row) for i, (_, one) in enumerate(flat) for row in one.rows]
    gone = [(i, one.deletes) for i, (_, one) in enumerate(flat) if one.deletes is not None]
    key_schema = pa.schema([schema.field(name) for name in keys])

    def letters(wanted: Sequence[Rejection]) -> list[Reject]:
        return [
            Reject(
                partitions[flat[w.record][0]],
                flat[w.record][1].offset,
                flat[w.record][1].timestamp,
                flat[w.record][1].key,
                flat[w.record][1].value,
                flat[w.record][1].headers,
                w.stage,
                w.reason,
            )
            for w in wanted
        ]

    return Chunk(
        ranges={tp: OffsetRange(at, records[-1].offset + 1) for tp, (at, records) in parts.items()},
        partitions=partitions,
        partition=np.array([at for at, _ in flat], dtype=np.int32),
        offset=np.array([one.offset for _, one in flat], dtype=np.int64),
        rows=pa.Table.from_pylist([row for _, row in rows], schema=schema),
        row_record=np.array([i for i, _ in rows], dtype=np.int64),
        deletes=pa.Table.from_pylist([row for _, row in gone], schema=key_schema) if gone else None,
        delete_record=np.array([i for i, _ in gone], dtype=np.int64),
        rejections=tuple(
            Rejection(i, "decode", one.bad) for i, (_, one) in enumerate(flat) if one.bad
        ),
        dead_letters=letters,
    )


def at_t0(start: int, records: Sequence[Rec], schema: pa.Schema = SCHEMA, **more: Any) -> Chunk:
    """A chunk of partition t-0."""
    return chunk({T0: (start, records)}, schema, **more)


def impatient(**_: object) -> Backoff:
    """Asks again at once, a few times."""
    return Backoff(first=0.001, longest=0.001, total=0.01, clock=lambda: 0.0)


def commit_all(
    sink: Any,
    what: Chunk,
    fence: Fence,
    max_rejects: int | None = None,
    patience: Backoff | None = None,
) -> list[Outcome]:
    """Through the commit path that every runtime takes: a sink, a delivery, or a run's."""
    delivery = sink.context.delivery if isinstance(sink, OpenLedger) else sink
    if not isinstance(delivery, Delivery):
        delivery = together(delivery)
    return list(commit(delivery, what, fence, max_rejects, patience or impatient()))


def asking_again(call: Callable[[], Any]) -> Any:
    """As a driver does: a takeover has ended the sessions of the older run."""
    try:
        return call()
    except Unavailable:
        return call()


AnySink = TypeVar("AnySink", bound=Sink)


def together(sink: AnySink) -> Delivery[AnySink]:
    """Exactly once: positions take effect in the sink's own transaction."""
    return Delivery(sink, sink.ledger)


def commit_on(
    sink: Any,
    what: Chunk,
    entries: Mapping[TopicPartition, Entry],
    fence: Fence,
    max_rejects: int | None = None,
) -> Any:
    """The sink's own commit, as if decided on these entries."""
    return sink.commit(what, fence, Claim(fence, what.ranges, entries), max_rejects)


def with_rows(batch: Batch, sink: Any, *rows: pa.Table) -> Batch:
    """The batch with rows of a Spark transform, as the driver reads them from Spark."""
    packets = [one for part in rows if part.num_rows for one in sink.pack(part)]
    return replace(batch, staged=[one.staged for one in packets], packets=lambda: iter(packets))


def publish_on(
    sink: Any, what: Batch, entries: Mapping[TopicPartition, Entry], fence: Fence
) -> None:
    """The sink's own publication, as if decided on these entries."""
    sink.publish(what, fence, Claim(fence, what.ranges, entries))


# -- faults --------------------------------------------------------------------------------

Around = Callable[[str, Callable[[], Any]], Any]
"""``(name of the call, the call) -> its answer``."""


class Wrapped:
    """A connection, every call of which goes through ``around``."""

    def __init__(self, inner: Connection, around: Around) -> None:
        self._inner, self._around = inner, around

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)
        return lambda *args, **kwargs: self._around(name, lambda: method(*args, **kwargs))


def through(around: Around) -> Connect:
    """A way to connect whose sessions go through ``around``."""

    def opening(dialect: Dialect, application: str) -> Connection:
        return Wrapped(around("connect", lambda: connect(dialect, application)), around)  # type: ignore[return-value]

    return opening


def with_faults(sink: SqlSink, around: Around) -> SqlSink:
    return replace(sink, connect=through(around))


def batches_of(records: Sequence[Rec], size: int) -> Iterator[Sequence[Rec]]:
    for at in range(0, len(records), size):
        yield records[at : at + size]


def offsets(found: Iterable[tuple[Any, ...]]) -> list[int]:
    return [int(one[0]) for one in found]


def kept_values(
    records: pa.Table, origins: Sequence[tuple[TopicPartition, int]], why: Sequence[Rejection]
) -> list[Reject]:
    """Dead letters with the values of their records only."""
    return [
        Reject(tp, offset, None, None, value, (), one.stage, one.reason)
        for (tp, offset), value, one in zip(
            origins, records.column("value").to_pylist(), why, strict=True
        )
    ]


def losing_first_commit(lost: list[str]) -> Callable[[str, Callable[[], Any]], Any]:
    """A fault: the answer to the first COMMIT is lost, and noted."""

    def losing(name: str, call: Callable[[], Any]) -> Any:
        answer = call()
        if name == "commit" and not lost:
            lost.append(name)
            raise Unavailable("the answer was lost")
        return answer

    return losing


class Died(BaseException):
    """The process ends here: nothing that it would have done follows."""
