"""A record's fate does not depend on its neighbours.

The same records, committed in any chunks, make the same table and the same dead letters as when
each is committed alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncely.core.batch import Chunk, Rejection
from oncely.core.claim import Fence
from oncely.decode.avro_schema import arrow_schema_of
from oncely.kafka.topics import TopicLimits
from oncely.kinds.data_file import FileFormat, read_receipt
from oncely.kinds.kafka.form import digested, encode, of_partition
from oncely.kinds.kafka.format import SOURCE_HEADER, AvroValue, RawValue, RecordFormat
from oncely.kinds.partitions import parse_partition_by
from oncely.kinds.staged_files import FilesTask
from oncely.runtimes.chunks import records_of
from tests import deltatools
from tests.conftest import examples
from tests.filetools import Shelf, rows_of
from tests.sinktools import T0, Place, Rec, chunk, commit_all, ready, sink_to, trigger

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("name", pa.string())])
Outcome = Callable[[Sequence[Rec], set[int]], Any]
"""What becomes of records in chunks that end at the cuts."""
NAMES = (None, "a", "A", "a ", "b", "toolong")
ROW = st.fixed_dictionaries(
    {
        "id": st.integers(0, 3),
        "v": st.sampled_from([None, 0, 1, 2, 13]),
        "name": st.sampled_from(NAMES),
    }
)
DELETES = st.fixed_dictionaries({"id": st.integers(0, 3), "name": st.sampled_from(NAMES[1:])})

APPEND = {
    "row": "id {n} NOT NULL, v {n} NOT NULL CHECK (v <> 13), name {varchar}",
    "unique": "id {n} UNIQUE, v {n}, name {text} UNIQUE",
    "itself": "id {n} PRIMARY KEY, v {n} REFERENCES rows (id), name {text}",
}
APPEND_POSTGRES = {
    "deferred": "id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, v bigint, name text",
    "itself, deferred": "id bigint PRIMARY KEY, name text,"
    " v bigint REFERENCES rows (id) DEFERRABLE INITIALLY DEFERRED",
    "domain": "id bigint, v bigint, name short",
    "excluded": "id bigint, v bigint, name text, EXCLUDE (id WITH =, v WITH =)",
}
UPSERT = {
    "row": "id {n} PRIMARY KEY, v {n} NOT NULL CHECK (v <> 13), name {varchar}",
    "unique": "id {n} PRIMARY KEY, v {n}, name {text} UNIQUE",
    "itself": "id {n} PRIMARY KEY, v {n} REFERENCES rows (id), name {text}",
    "other": "id {n} PRIMARY KEY, v {n} REFERENCES other (id), name {text}",
    "unwritten": "id {n} PRIMARY KEY, v {n}, name {text}, more {n} DEFAULT 1, CHECK (v <> more)",
    "folded": "id {n}, v {n} CHECK (v <> 13), name {folded} PRIMARY KEY",
}
UPSERT_POSTGRES = {
    "deferred": "id bigint PRIMARY KEY, v bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, name text",
    "padded": "id bigint, v bigint CHECK (v <> 13), name char(3) PRIMARY KEY",
    "domain": "id bigint PRIMARY KEY, v bigint, name mood",
}
TRIGGERS = {
    "before": (
        "BEFORE INSERT OR UPDATE ON rows",
        "IF NEW.v = 13 THEN RAISE 'thirteen'; END IF; RETURN NEW;",
    ),
    "counting": ("BEFORE UPDATE ON rows", "NEW.more := OLD.more + 1; RETURN NEW;"),
    "sum": (
        "AFTER INSERT ON rows",
        "IF (SELECT sum(v) FROM {rows}) % 3 = 0 THEN RAISE 'three'; END IF; RETURN NEW;",
    ),
}
WORDS = {  # a server without ICU has no collation that folds
    "postgresql": {"n": "bigint", "text": "text", "varchar": "varchar(3)", "folded": "varchar"},
    "sqlite": {
        "n": "INT",
        "text": "TEXT",
        "varchar": "TEXT CHECK (length(name) <= 3)",
        "folded": "TEXT COLLATE NOCASE",
    },
}


def create(place: Place, columns: str) -> None:
    """The table ``rows``, and what its columns refer to."""
    if place.is_postgres:
        place.sql("CREATE DOMAIN short AS text NOT NULL CHECK (length(VALUE) <= 3)")
        place.sql("CREATE TYPE mood AS ENUM ('a', 'A', 'b')")
    strict = "" if place.is_postgres else " STRICT"
    words = WORDS[place.kind]
    place.sql(f"CREATE TABLE other (id {words['n']} PRIMARY KEY){strict}")
    place.sql("INSERT INTO other VALUES (0), (1)")
    place.sql(f"CREATE TABLE rows ({columns.format(**words)}){strict}")


def chunks(
    records: Sequence[Rec], cuts: set[int], schema: pa.Schema, keys: Sequence[str]
) -> Iterator[Chunk]:
    """The records in chunks that end at the cuts."""
    ends = [*sorted(cut for cut in cuts if cut < len(records)), len(records)]
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end:
            yield chunk({T0: (start, records[start:end])}, schema, keys)


def outcome(
    place: Place, to: tuple[Any, Any], records: Sequence[Rec], cuts: set[int], keys: Sequence[str]
) -> Any:
    """The table and the dead letters after the records were committed in chunks."""
    place.sql("DELETE FROM rows")
    place.sql('UPDATE oncely_positions SET "position" = 0')
    place.sql("DELETE FROM oncely_ranges")
    place.sql("DELETE FROM oncely_rejects")
    for one in chunks(records, cuts, SCHEMA, keys):
        commit_all(to[0], one, to[1])
    rejects = place.sql('SELECT "offset", stage FROM oncely_rejects ORDER BY 1')
    return sorted(place.sql("SELECT * FROM rows"), key=repr), rejects


def same_in_any_chunks(record: Any, outcome: Outcome, usual: int = 8, most: int = 10) -> None:
    """Any chunks do the same as one chunk a record."""

    @settings(max_examples=examples(usual), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(record, min_size=2, max_size=most), st.sets(st.integers(1, 9)))
    def same(made: list[Any], cuts: set[int]) -> None:
        records = [replace(one, offset=n) for n, one in enumerate(made)]
        alone = outcome(records, set(range(len(records))))
        assert outcome(records, set()) == alone
        assert outcome(records, cuts) == alone

    same()


def records(row: Any, deletes: Any = None, **more: Any) -> Any:
    """Records of one row, of several, of none, and tombstones."""
    rows = st.one_of(
        st.lists(row, min_size=1, max_size=1), st.just([]), st.lists(row, min_size=2, max_size=3)
    )
    valued = st.builds(Rec, st.just(0), rows, **more)
    if deletes is None:
        return valued
    single = st.builds(Rec, st.just(0), st.tuples(row), **more)
    gone = st.builds(Rec, st.just(0), deletes=deletes, value=st.none(), **more)
    return st.one_of(*[single] * 3, valued, gone)


def check(place: Place, keys: Sequence[str] = (), version: str | None = None) -> None:
    """Any chunks do the same in a table."""
    to = ready(sink_to(place, SCHEMA, keys=keys, version=version))
    deletes = DELETES.map(lambda row: {key: row[key] for key in keys}) if keys else None
    record = records(ROW, deletes)
    same_in_any_chunks(record, lambda made, cuts: outcome(place, to, made, cuts, keys))


@pytest.mark.parametrize("columns", APPEND.values(), ids=APPEND)
def test_appended(place: Place, columns: str) -> None:
    create(place, columns)
    check(place)


@pytest.mark.parametrize("columns", APPEND_POSTGRES.values(), ids=APPEND_POSTGRES)
def test_appended_to_postgresql(on_postgres: Place, columns: str) -> None:
    create(on_postgres, columns)
    check(on_postgres)


@pytest.mark.parametrize("version", [None, "v"], ids=["plain", "versioned"])
@pytest.mark.parametrize("name", UPSERT)
def test_upserted(place: Place, name: str, version: str | None) -> None:
    create(place, UPSERT[name])
    if name == "other":
        place.sql("CREATE TABLE child (id INT)" + ("" if place.is_postgres else " STRICT"))
    check(place, ["name" if name == "folded" else "id"], version)


@pytest.mark.parametrize("name", UPSERT_POSTGRES)
def test_upserted_to_postgresql(on_postgres: Place, name: str) -> None:
    create(on_postgres, UPSERT_POSTGRES[name])
    check(on_postgres, ["name" if name == "padded" else "id"])


@pytest.mark.parametrize("keys", [(), ("id",)], ids=["append", "upsert"])
@pytest.mark.parametrize(("on", "body"), TRIGGERS.values(), ids=TRIGGERS)
def test_triggers(on_postgres: Place, on: str, body: str, keys: tuple[str, ...]) -> None:
    key = " PRIMARY KEY" if keys else ""
    create(on_postgres, f"id bigint{key}, v bigint, name text, more bigint DEFAULT 0")
    trigger(on_postgres, body.format(rows=f"{on_postgres.schema}.rows"), on)
    check(on_postgres, keys)


# -- topics --------------------------------------------------------------------------------


TOPIC_ROWS = pa.schema(
    [("k", pa.string()), ("v", pa.int64()), ("d", pa.float64()), ("b", pa.binary()),
     ("t", pa.timestamp("us", "UTC")), ("to", pa.string())]
)  # fmt: skip
TOPIC_ROW = st.fixed_dictionaries(
    {
        "k": st.sampled_from([None, "", "a", "k" * 90]),
        "v": st.sampled_from([None, 0, 1 << 40]),
        "d": st.sampled_from([None, 0.0, -0.0, 1.5, float("nan"), float("inf")]),
        "b": st.sampled_from([None, b"", b"\xff", b"v" * 90]),
        "t": st.sampled_from([None, 0, -1, 10**18]),  # the year 33658
        "to": st.sampled_from([None, "", "out", "keyed", "nowhere", "__consumer_offsets"]),
    }
)
AVRO = """{"type": "record", "name": "r", "fields": [{"name": "k", "type": ["null", "string"]},
 {"name": "v", "type": "int"}, {"name": "d", "type": ["null", "double"]}, {"name": "b", "type":
 ["null", "bytes"]}, {"name": "t", "type": ["null", "long"]}, {"name": "to", "type": "string"}]}"""
LIMITS = {"out": TopicLimits(220), "keyed": TopicLimits(10**6, True, 10**15, 10**12)}
FORMS = {
    "json": RecordFormat(TOPIC_ROWS, topic="out", key="k"),
    "json, keyed": RecordFormat(TOPIC_ROWS, topic="keyed", key="k", source_timestamp=True),
    "bytes": RecordFormat(TOPIC_ROWS, RawValue("b"), "out", key="k", keep_source=True),
    "topics": RecordFormat(TOPIC_ROWS, topic_column="to", key="k", source_timestamp=True),
    "avro": RecordFormat(TOPIC_ROWS, AvroValue(AVRO), "keyed", key="k"),
}
HEADERS = st.lists(
    st.tuples(st.sampled_from(["", "a", "a\0", SOURCE_HEADER]), st.sampled_from([None, b"", b"x"])),
    max_size=2,
)


@pytest.mark.parametrize("headers", [False, True], ids=["plain", "headers"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_messages(form: RecordFormat, headers: bool) -> None:
    """Keys, values, headers, timestamps, topics and digests of messages, and dead letters."""

    def encoded(made: Sequence[Rec], cuts: set[int]) -> Any:
        sent, digests, rejects = dict[str, list[Any]](), list[Any](), list[Any]()
        for one in chunks(made, cuts, TOPIC_ROWS, ["k"]):
            every = [Rejection(at, "write", "") for at in range(one.records)]
            source = records_of(one.dead_letters(every))
            copied = source["headers"] if headers else None
            whole = replace(one, headers=copied, timestamps=source["timestamp"])
            found = encode(whole, form, lambda _: LIMITS)
            for topic, at in of_partition(found, one, T0).items():
                sent.setdefault(topic, []).extend(
                    zip(
                        one.offset[found.row_record[at]].tolist(),
                        found.rows.messages(at),
                        strict=True,
                    )
                )
            digests += digested(found, one, form.recipe).digests.of_row.tolist()
            rejects += [(int(one.offset[bad.record]), *bad[1:]) for bad in found.rejections]
        return sent, digests, rejects

    times = st.sampled_from([-1, 0, 1, 1_700_000_000_000, 1 << 50])
    deletes = st.fixed_dictionaries({"k": st.sampled_from(["", "a", "k" * 250])})
    record = records(TOPIC_ROW, deletes, headers=HEADERS, timestamp=times)
    same_in_any_chunks(record, encoded, 8)


# -- files and Delta tables ----------------------------------------------------------------


PARTITIONS = (None, "", "a", "a/b", "50%", "ü", "..", "x" * 5_000)
WRITTEN = st.sampled_from([None, True, 1, (1 << 53) + 1, 1 << 64, 1.5, "x", [], [1], ["x"], {}])
INFERRED = st.fixed_dictionaries(
    {"p": st.sampled_from([*PARTITIONS, 7])},
    optional={"a": WRITTEN, "b": st.builds(dict, c=WRITTEN)},
).map(lambda row: {"value": json.dumps(row).encode()})
FIXED = st.fixed_dictionaries(
    {"p": st.sampled_from(PARTITIONS), "t": st.sampled_from([None, 0, 10**18]), "n": st.just(1)}
)
FILES = {
    "inferred": (pa.schema([("value", pa.binary())]), None, ("p",), INFERRED),
    "inferred, one scope": (pa.schema([("value", pa.binary())]), None, (), INFERRED),
    "given": (
        schema := pa.schema([("p", pa.string()), ("t", pa.int64()), ("n", pa.int64())]),
        schema, ("p", "date(t)"), FIXED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("format", ["avro", "parquet"])
@pytest.mark.parametrize(("rows", "schema", "by", "row"), FILES.values(), ids=FILES)
def test_files(rows: pa.Schema, schema: Any, by: tuple[str, ...], row: Any, format: Any) -> None:
    """Rows and their partitions, without the columns that have no value; and dead letters."""
    form = FileFormat(format, parse_partition_by(by), schema)

    def written(made: Sequence[Rec], cuts: set[int]) -> Any:
        known = dict[Any, pa.Schema]() if schema is None else {(): schema}
        found, rejects = list[str](), list[Any]()
        for number, one in enumerate(chunks(made, cuts, rows, ())):
            store = Shelf().store()
            task = FilesTask(store, form, known, Fence("p", 1), number, 0)
            rejects += [(int(one.offset[bad.record]), *bad[1:]) for bad in task.add(one)]
            receipt = read_receipt(task.finish().name or "")
            known |= {scope: arrow_schema_of(receipt.schemas[id_]) for scope, id_ in receipt.grown}
            for file in receipt.files:
                of_file = rows_of(store.read(file.path))
                found += [repr((file.partition, valued(one))) for one in of_file]
        return sorted(found), rejects, {scope: set(one) for scope, one in known.items()}

    same_in_any_chunks(records(row), written, 8)


def valued(value: Any) -> Any:
    """Without members that have no value; whole numbers of a DOUBLE as such."""
    if isinstance(value, dict):
        return {name: one for name, own in value.items() if (one := valued(own)) not in (None, {})}
    if isinstance(value, list):
        return [valued(one) for one in value] or None
    whole = type(value) is float and value.is_integer()
    return int(value) if whole else value


NAN, ZEROS = float("nan"), (0.0, -0.0)
DELTA = {
    "append": ((), None, (None, NAN, *ZEROS)),
    "upsert, NaN": (("k",), None, (NAN, -NAN)),
    "upsert, 0": (("k",), None, (None, *ZEROS)),
    "upsert, versioned": (("k",), "v", (NAN, -NAN)),
}


@pytest.mark.parametrize(("keys", "version", "doubles"), DELTA.values(), ids=DELTA)
def test_delta(
    tmp_path: Path, keys: tuple[str, ...], version: str | None, doubles: tuple[float | None, ...]
) -> None:
    """Rows of a table by bits of their numbers, and dead letters."""
    schema = pa.schema([("k", pa.float64()), ("v", pa.float64()), ("p", pa.string())])
    by = () if keys else ("p",)

    def committed(made: Sequence[Rec], cuts: set[int]) -> Any:
        place = deltatools.make_place(tmp_path)
        sink = place.sink(schema, partition_by=by, keys=keys, version=version)
        to, fence = ready(deltatools.Committing(sink))  # type: ignore[arg-type]
        for one in chunks(made, cuts, schema, keys):
            commit_all(to, one, fence)
        return [*map(repr, place.rows())], place.letters()

    numbers, texts = st.sampled_from(doubles), st.sampled_from(["a", "b", *PARTITIONS[:-1]])
    row = st.fixed_dictionaries({"k": numbers, "v": numbers, "p": texts})
    deletes = st.fixed_dictionaries({"k": numbers.filter(lambda one: one is not None)})
    same_in_any_chunks(records(row, deletes if keys else None), committed, 5, 4)
