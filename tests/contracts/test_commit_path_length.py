"""Each commit crosses few functions and files, and ARCHITECTURE.md names them in order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa

import oncely
from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.commit.path import publish
from oncely.core.batch import Batch
from oncely.core.claim import Budget, Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.decode.base import Decoded
from oncely.kafka.client import make
from oncely.kafka.sender import Producer
from oncely.kinds.base import PacksRows
from oncely.kinds.files.compact import compact
from oncely.kinds.handlers.sink import HandlersSink
from oncely.kinds.sql.change import SqlReplay
from oncely.kinds.sql_ledger import discard_letters
from oncely.pipeline.rejects import RejectFilter, discard
from oncely.runtimes.batches.commit import commit_chunks
from oncely.runtimes.chunks import RangeReader
from oncely.runtimes.jobs import Attempt
from oncely.runtimes.row_transform import Unchanged
from oncely.stores.delta import DeltaTables
from oncely.stores.sql.connection import connect
from oncely.stores.sql.ledger import SqlLedger
from oncely.testing.servers.kafka import Broker
from tests.conftest import repository
from tests.deltatools import make_place as make_delta
from tests.filestools import make_place, stage, what
from tests.filestools import open_sink as open_files
from tests.jobtools import GivenRecords, records
from tests.kafkatools import make_topics
from tests.kafkatools import ready as ready_topics
from tests.laketools import events, lake
from tests.replaytools import bad, judging, pipeline_of, replayed
from tests.sinktools import (
    SCHEMA,
    T0,
    Place,
    at_t0,
    commit_all,
    numbered,
    open_sink,
    ready,
    sink_to,
    together,
    with_rows,
)
from tests.unit.test_one_commit_path import CLIENTS

_SRC = Path(oncely.__file__).parent
_MOST, _MOST_FILES = 8, 10
_DRIVER = ["run", "OpenLedger.publish"]
"""Before ``path.publish``, in the driver: the ``run`` of a batch or range commit, and this."""


class Crossed:
    """The functions that led to the last COMMIT, from the outermost one on."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.files: set[str] = set()

    def look(self) -> None:
        """Called where the COMMIT is sent; the client is one function, whatever it calls."""
        found: list[tuple[str, str]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if (file := Path(frame.f_code.co_filename)).is_relative_to(_SRC):
                found.append((file.relative_to(_SRC).as_posix(), frame.f_code.co_qualname))
            frame = frame.f_back
        clients = [one for one in found if one[0].startswith(CLIENTS)]
        path = [one for one in reversed(found) if one not in clients] + clients[-1:]
        self.functions = [one for one, _ in groupby(name(*one) for one in path)]
        self.files = {file for file, _ in path}


def name(file: str, qualname: str) -> str:
    """``Class.method``, or ``module.function``; of a function within one, the outer one's."""
    outer = qualname.partition(".<locals>")[0]
    return outer if "." in outer else f"{Path(file).stem}.{outer}"


class _Watching:
    """A client; it looks when it is asked to commit."""

    def __init__(self, inner: Any, method: str, look: Callable[[], None]) -> None:
        self._inner, self._method, self._look = inner, method, look

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._look()
        return getattr(self._inner, name)


def sql(crossed: Crossed) -> Any:
    return lambda *given: _Watching(connect(*given), "commit", crossed.look)


def kafka(crossed: Crossed) -> Any:
    def connecting(kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        if not issubclass(kind, Producer):
            return made
        return _Watching(made, "commit_transaction", crossed.look)

    return connecting


def in_the_table(what: str, crossed: Crossed, *, before: list[str] | None = None) -> None:
    functions = [*(before or []), *crossed.functions]
    assert len(functions) <= _MOST, functions
    assert len(crossed.files) + (2 if before else 0) <= _MOST_FILES
    row = f"| {what} | {' → '.join(f'`{one}`' for one in functions)} |"
    assert row in (repository() / "docs" / "ARCHITECTURE.md").read_text("utf-8"), row


class Decoder:
    """Every record is a row."""

    needs = frozenset({"value"})
    schema = SCHEMA

    def decode(self, records: pa.Table) -> Decoded:
        rows = at_t0(0, numbered(0, records.num_rows)).rows
        return Decoded(rows, pa.array(range(records.num_rows), pa.int64()), [])


def run_a_task(sink: Any, fence: Fence) -> None:
    source = GivenRecords([records(T0, [b"x"] * 3)])
    reading = RangeReader(source, Decoder(), Unchanged(), frozenset({"value"}))
    share = {T0: OffsetRange(0, 3)}
    list(commit_chunks(together(sink), fence, Budget(), reading, share, Attempt(0)))


def publish_rows(sink: Any, fence: Fence) -> None:
    batch = Batch({T0: OffsetRange(0, 3)}, {T0: Counts(3, 3, 0, 0)})
    rows = at_t0(0, numbered(0, 3)).rows
    if isinstance(sink, PacksRows):
        batch = with_rows(batch, sink, rows)
    else:
        batch = replace(batch, staged=(sink.stage(fence, 0, 0, iter([rows])),))
    publish(together(sink), batch, fence, lambda: sink.ledger.positions(fence))


def test_a_chunk_into_a_table(place: Place) -> None:
    run_a_task(*ready(sink_to(place, connect=sql(crossed := Crossed()))))
    handed_over("a chunk into a table", crossed)


def test_a_chunk_to_handlers(on_postgres: Place) -> None:
    crossed, table = Crossed(), on_postgres.table("oncely_positions")
    ledger = SqlLedger("p", on_postgres.dialect, table, connect=sql(crossed))
    sink = HandlersSink(ledger, {"t": lambda _, tx: tx.execute("SELECT 1")})
    commit_all(sink, at_t0(0, numbered(0, 3)), open_sink(sink).fence)
    in_the_table("a chunk to handlers", crossed, before=["PipelinedCommit.begin"])


def test_a_chunk_into_a_topic(broker: Broker) -> None:
    sink, fence = ready_topics(make_topics(broker).sink(connect=kafka(crossed := Crossed())))
    with closing(sink):
        run_a_task(sink, fence)
    handed_over("a chunk into a topic", crossed)


def handed_over(what: str, crossed: Crossed) -> None:
    """What a task has read is committed in another thread."""
    in_the_table(what, crossed, before=["commit.commit_chunks"])


def test_a_batch_into_a_table(place: Place) -> None:
    publish_rows(*ready(sink_to(place, connect=sql(crossed := Crossed()))))
    in_the_table("a batch into a table", crossed, before=_DRIVER)


def test_a_batch_into_a_topic(broker: Broker) -> None:
    made = make_topics(broker).sink(connect=kafka(crossed := Crossed()))
    made.by_batch = True
    sink, fence = ready_topics(made)
    with closing(sink):
        publish_rows(sink, fence)
    in_the_table("a batch into a topic", crossed, before=_DRIVER)


def test_a_batch_into_files(broker: Broker, tmp_path: Path) -> None:
    sink = make_place(broker, tmp_path).sink(kafka=kafka(crossed := Crossed()))
    with closing(sink):
        fence = open_files(sink).fence
        batch = what(stage(sink, fence))
        publish(together(sink), batch, fence, lambda: sink.ledger.positions(fence))
    in_the_table("a batch into files", crossed, before=_DRIVER)


def test_a_batch_into_a_delta_table(tmp_path: Path) -> None:
    crossed = Crossed()

    class Watched(DeltaTables):
        def commit(self, table: Any, change: Any) -> None:
            crossed.look()
            crossed.functions.append("DeltaTables.commit")
            super().commit(table, change)

    publish_rows(*ready(make_delta(tmp_path).sink(delta=Watched)))
    in_the_table("a batch into a Delta table", crossed, before=_DRIVER)


def test_a_replay_into_a_table(place: Place) -> None:
    sink, fence = ready(sink_to(place, connect=sql(crossed := Crossed())))
    commit_all(sink, at_t0(0, bad(0, 1)), fence)
    assert replay(SqlReplay(sink), judging(), Backoff()) == (2, 0)
    in_the_table("dead letters into a table", crossed)


def test_a_discard(place: Place) -> None:
    sink, fence = ready(sink_to(place, connect=sql(crossed := Crossed())))
    commit_all(sink, at_t0(0, bad(0, 1)), fence)
    pipeline = pipeline_of(partial(discard_letters, sink.ledger))
    assert discard(pipeline, RejectFilter(), execute=True).total == 2
    in_the_table("a discard of dead letters in SQL", crossed)


def test_a_replay_into_a_topic(broker: Broker) -> None:
    topics = make_topics(broker)
    sink, fence = ready_topics(topics.sink())
    commit_all(sink, at_t0(0, bad(0, 1)), fence)
    crossed = Crossed()
    assert replayed(topics.sink(connect=kafka(crossed))) == (2, 0)
    in_the_table("dead letters into a topic, or files", crossed)


def test_a_compaction(broker: Broker, tmp_path: Path) -> None:
    own = lake(broker, tmp_path)
    for start in (0, 3):
        own.batch_of(events("ann", start, 3), start=start)
    place = replace(own.table.pipeline_topics, connect=kafka(crossed := Crossed()))
    assert compact(own.with_(pipeline_topics=place).table).outputs == 1
    in_the_table("files into one", crossed)
