"""Builds everything that is stored from fixed input: the one module that a move of code touches.

Each function gives golden files by name: their text, byte for byte what was written, one record a
line. What only a server knows, or differs from run to run, is replaced by a word in ``<>``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fastavro
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import ConsumerGroupTopicPartitions, TopicCollection

from oncely.commit.path import pass_over
from oncely.core.batch import Batch, Reject
from oncely.core.claim import (
    Amendment,
    Claim,
    Counts,
    Fence,
    Notes,
    QueryBatch,
    RejectCount,
    Takeover,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.avro_schema import avro_schema_of, schema_id
from oncely.kafka.client import make
from oncely.kafka.transaction import Message
from oncely.kinds.data_file import AvroFiles, ParquetFiles, SourceRange
from oncely.kinds.data_file import encode as manifest_value
from oncely.kinds.files.compact import compact
from oncely.kinds.files.manifest import FIELDS, LiveFiles, ReadSoFar, TopicsSnapshot, save
from oncely.kinds.files.records import (
    ManifestFile,
    ManifestOwner,
    ScopeSchema,
    owner_key,
    path_key,
    schema_key,
)
from oncely.kinds.partitions import FileNames, directory, parse_partition_by
from oncely.kinds.sql.table import TableSpec, create_statement
from oncely.kinds.topic_publishing import DeadLetter, again, dead_letter
from oncely.stores.offsets.base import StoredPosition, field_of
from oncely.stores.offsets.base import encode as store_value
from oncely.stores.offsets.file import FileStore
from oncely.stores.offsets.redis import RedisStore
from oncely.stores.offsets.zookeeper import ZooKeeperStore
from oncely.stores.sql.connection import (
    Connection,
    Dialect,
    TableName,
    application_name,
    close_all,
    connect,
)
from oncely.stores.sql.dialects import dialect_for
from oncely.stores.sql.tables import TABLES, LedgerTables
from oncely.stores.topic.records import (
    LedgerKeys,
    OffsetMetadata,
    PipelineRecord,
    PositionRecord,
    ReplayRecord,
    ResetRecord,
    encode,
    replay_group,
    stamp,
)
from oncely.testing.servers.kafka import Broker
from tests import deltatools, filestools, kafkatools, replaytools
from tests.scenarios.publishing_jobs import publish_all
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Place,
    Rec,
    chunk,
    commit_all,
    rec,
    sink_to,
    together,
    with_rows,
)

HERE = Path(__file__).parent
PIPELINES = ("orders", 'née "x"/1, longer than any session\'s name may be')
Golden = dict[str, str]

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("small", pa.int32()),
        ("ok", pa.bool_()),
        ("ratio", pa.float32()),
        ("exact", pa.float64()),
        ("name", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("price", pa.decimal128(12, 2)),
    ]
)
NESTED = pa.schema(
    [
        *COLUMNS,
        ("tags", pa.list_(pa.string())),
        ("who", pa.struct([("first name", pa.string()), ("n", pa.list_(pa.int64()))])),
    ]
)


# -- what needs no server --------------------------------------------------------------------


def names() -> Golden:
    """Ids, names and paths."""
    found: list[tuple[str, str]] = []
    for pipeline in PIPELINES:
        words = LedgerKeys(pipeline)
        found += [
            ("transactional id of openers", words.opener),
            ("transactional id of a position", words.writer(TopicPartition("t", 3))),
            ("second transactional id of a position", words.second(TopicPartition("t", 3))),
            ("transactional id of the publisher", words.publisher),
            ("transactional id of replays", words.replayer),
            ("group of replays", replay_group(pipeline)),
            ("application name", application_name(pipeline, 12)),
        ]
    levels = parse_partition_by(("name", "date(at)", "hour(at)"))
    name = FileNames(7, 3, "t1", "0123456789abcdef")
    for values in (
        ("ann", "2026-03-01", "07"),
        (None, None, None),
        ("a/b é~", "", ".."),
        ("x" * 300, "", ""),
    ):
        found.append(("directory", directory(levels, values)))
    found += [
        ("file", name.name(("t", 3, 42), "avro")),
        ("file of mixed rows", name.name(None, "parquet")),
        ("schema id", schema_id(avro_schema_of(COLUMNS))),
    ]
    return {"names.txt": "".join(f"{what}: {text}\n" for what, text in found)}


def ledger_records() -> Golden:
    """Each kind of record in the ledger topic, and the metadata of group offsets."""
    words, tp = LedgerKeys("orders"), TopicPartition("t", 3)
    own = "cluster-1", "id-of-t"
    done = PositionRecord(17, 4, *own, 10, 17, "data", 6, 5, 1, 2, "partition", None)
    batch = PositionRecord(17, 4, *own, 17, 17, "taken", 0, 0, 0, 0, "batch", None)
    turn = PositionRecord(18, 4, *own, 17, 18, "data", 1, 1, 0, 0, "second", None)
    new = PipelineRecord(
        1, "run-1", "cluster-1", {"t": "id-of-t"}, "out", {"t": {3: 0}}, {}, {}, {}, {},
        RejectCount(),
    )  # fmt: skip
    known = PipelineRecord(
        4, "run-4", "cluster-1", {"t": "id-of-t", "u": "id-of-u"}, "out", {"u": {0: 5}},
        {"t": [0, 3]}, {"out": "id-of-out"}, {"t": {3: 9}}, {"t": {0: 2, 3: 1}},
        RejectCount("1%", 1_000, 3),
    )  # fmt: skip
    records = [
        *((words.pipeline_key(), encode(one)) for one in (new, known)),
        *((words.position_key(tp), encode(one)) for one in (done, batch, turn)),
        (words.reset_key(tp, 5), encode(ResetRecord(9))),
        (words.replayed_key(TopicPartition("out.rejects", 0)), encode(ReplayRecord(3, "id-of-it"))),
        (LedgerKeys(PIPELINES[1]).position_key(tp), encode(done)),
    ]
    stamps = [
        stamp(one, "orders")
        for one in (done, batch, turn, OffsetMetadata(1, 2, "cluster-1", "id-of-t"))
    ]
    return {
        "ledger_topic.jsonl": lines([key, value] for key, value in records),
        "offset_metadata.txt": "".join(f"{one}\n" for one in stamps),
    }


def ddl() -> Golden:
    """The statements that ``oncely plan`` prints, for both kinds of database."""
    found = {}
    for url in ("postgresql://user@host/database", "sqlite:////folder/file.db"):
        dialect, table = dialect_for(url), TableName(None, "orders")
        schema = NESTED if dialect.name == "postgresql" else COLUMNS
        wanted = [TableSpec(table, schema), TableSpec(table, COLUMNS, ("id", "day"), "at")]
        made = [create_statement(dialect, one) for one in wanted]
        made += LedgerTables(dialect, table, "orders").ddl()
        found[f"ddl_{dialect.name}.sql"] = "".join(f"{one};\n" for one in made)
    return found


def dead_letters() -> Golden:
    """Messages for the rejects' topic."""
    headers = [("h", b"1"), ("h", None), ("oncely.pipeline", b"of another")]
    whole = Reject(T0, 5, 1_700_000_000_123, b"key", b"{", headers, "decode", "no JSON: é")
    large = replace(whole, value=b"x" * 300, headers=(), reason="r" * 190)
    fence = Fence("orders", 4)
    made = [
        dead_letter(whole, 1_000_000, fence),
        dead_letter(replace(whole, value=None, key=None, timestamp_ms=None), 1_000_000, fence),
        dead_letter(replace(whole, reason="r" * 4_000), 1_000_000, fence),
        dead_letter(large, 600, fence),
        dead_letter(large, 450, fence),
        dead_letter(replace(large, key=b"k" * 300), 450, fence),
        again(DeadLetter(whole, 4), 1_000_000, "orders"),
        again(DeadLetter(whole, 4, "too large"), 1_000_000, "orders"),
    ]
    return {"dead_letters.jsonl": lines(message(one) for one in made)}


def manifest() -> Golden:
    """Messages of the manifest and of the schema topic, and the user's snapshot of them."""
    avro = avro_schema_of(COLUMNS)
    file = ManifestFile(
        "name=ann/t-3-42.avro", "avro", 5, 1_234, "ab" * 32,
        {"name": "ann", "date": None}, ("2026-03-01T07:00:00Z", "2026-03-01T07:59:59.000001Z"),
        [SourceRange("t", 3, 42, 50)], ("ann",), schema_id(avro), "orders", 4, 7,
    )  # fmt: skip
    merged = msgspec.structs.replace(
        file, event_time=None, scope=(), batch=-1, replaces=["a.avro", "b.avro"]
    )
    schema = ScopeSchema(schema_id(avro), ("ann", None), avro)
    owner = ManifestOwner("orders", "s3://lake/orders")
    messages = [
        *([path_key(one.path), manifest_value(one)] for one in (file, merged)),
        [owner_key(owner.pipeline), manifest_value(owner)],
        [schema_key(schema.scope), manifest_value(schema)],
        [schema_key(()), None],
    ]
    live = LiveFiles()
    live.put(file)
    marks = ReadSoFar("id-of-manifest", (17, b"digest")), ReadSoFar("id-of-schema", None)
    kept = TopicsSnapshot(
        1_700_000_000.5, *marks, live.packed, {"a.avro": 1_700_000_000_000}, [schema], ["a.avro"],
        FIELDS, [owner],
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        save(Path(folder), kept)
        (snapshot,) = Path(folder).iterdir()
        text = f"{snapshot.name}\n{snapshot.read_bytes().hex()}\n"
    return {"manifest.jsonl": lines(messages), "manifest_snapshot.txt": text}


def file_formats() -> Golden:
    """What stands at the head of an Avro file, and at the end of a Parquet file."""
    rows = pa.Table.from_pylist([{"id": 1}], schema=NESTED)
    avro = bytes(AvroFiles(NESTED).prepare(rows)(0, 1))
    parquet = pa.BufferReader(ParquetFiles(NESTED).prepare(rows)(0, 1))
    footer = pq.read_schema(parquet)
    head = fastavro.reader(io.BytesIO(avro)).metadata
    kept = {k.decode(): v.decode() for k, v in footer.metadata.items()}
    columns = "".join(f"{one.name}: {one.type}\n" for one in footer)
    return {
        "avro_metadata.json": json.dumps(head, indent=1) + "\n",
        "parquet_metadata.json": json.dumps(kept, indent=1) + "\n",
        "parquet_columns.txt": columns,
    }


def offset_stores() -> Golden:
    """Positions in stores beside the sink."""
    one = StoredPosition(17, 4, "cluster-1", "id-of-t")
    tp, pipeline = TopicPartition("t", 3), 'née "x"/1'
    with TemporaryDirectory() as folder:
        store = FileStore(Path(folder), pipeline)
        store.save({tp: one, TopicPartition("a.b", 0): one})
        file = f"file {store.file.name}:\n{store.file.read_text()}"
    redis = f"redis {RedisStore('redis://h', pipeline).key} {field_of(tp)}: "
    zookeeper = f"zookeeper {ZooKeeperStore('h:1', pipeline)._path(tp)}: "
    value = store_value(one).decode()
    return {"offset_stores.txt": f"{file}{redis}{value}\n{zookeeper}{value}\n"}


PLAIN: Mapping[str, Callable[[], Golden]] = {
    one.__name__: one
    for one in (names, ledger_records, ddl, dead_letters, manifest, file_formats, offset_stores)
}


# -- what sinks leave ------------------------------------------------------------------------

BAD = Rec(2, bad="no JSON", value=b"{", headers=[("h", b"1"), ("h", None)])
RECORDS = [rec(0, id=1, name="a"), rec(1, id=2, name=None), BAD, rec(4, id=5, name="é")]


def in_tables(place: Place) -> Golden:
    """What the SQL sink leaves in an empty database, and how its sessions are called."""
    told: list[str] = []
    at = {T0: 0, T1: 5}
    sink = replace(
        sink_to(place, table="golden", pipeline="golden", keep_source=True),
        run="run-1",
        connect=_recording_sessions(told),
    )
    fence = sink.open(Takeover(SOURCE, lambda: at, at)).fence
    sink = sink.bind()
    commit_all(sink, chunk({T0: (0, RECORDS)}), fence)
    for kind, (start, end) in {"hole": (5, 7), "gap": (7, 9)}.items():
        pass_over(together(sink), {T0: OffsetRange(start, end)}, fence, kind)  # type: ignore[arg-type]
    sink.ledger.note(fence, Notes(leader_epochs={T0: 3}))
    sink.ledger.note(fence, Notes(counted=RejectCount("1%", 4, 1)))
    again = replace(sink, run="run-2")
    fence = again.open(Takeover(SOURCE, lambda: at, at)).fence
    rows = sink_rows(sink.wanted.schema)
    batch, positions = with_rows(_publication(), again, rows), again.ledger.positions(fence)
    query = QueryBatch("query", 3, "plan")
    again.publish(batch, fence, Claim(fence, batch.ranges, positions, query=query))
    with again.ledger.transaction(fence) as ours:
        change = Counts(0, 1, -1, 0, 2**64 - 5, "1 offset id=bigint")
        again.ledger.history.amend(
            ours, [Amendment(T0, OffsetRange(2, 3), "replay", change)], fence.epoch
        )
    replace(sink, run="run-3").open(Takeover(SOURCE, lambda: at, at, reset=lambda _: {T0: 4}))
    kind = "postgresql" if place.is_postgres else "sqlite"
    tables = [[name, *row] for name in TABLES for row in _content(place, name)]
    close_all()
    return {
        f"tables_{kind}.jsonl": lines(tables),
        f"statements_{kind}.txt": "".join(f"{one}\n" for one in dict.fromkeys(told)),
    }


def sink_rows(schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(
        [{"id": 7, "name": "s", "kafka_topic": "t", "kafka_partition": 0, "kafka_offset": 9}],
        schema=schema,
    )


def _publication() -> Batch:
    ranges = {T0: OffsetRange(9, 11), T1: OffsetRange(5, 6)}
    written = {T0: Counts(2, 0, 1, 0), T1: Counts(1, 0, 0, 0)}
    reject = Reject(T0, 10, None, None, b"x", (), "transform", "refused")
    return Batch(ranges, written, [reject])


def _recording_sessions(told: list[str]) -> Callable[[Dialect, str], Connection]:
    """Notes the names of sessions, and statements that create, alter or drop."""

    class Session:
        def __init__(self, inner: Connection) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def execute(self, sql: str, params: Any = (), **how: Any) -> int:
            if sql.startswith(("CREATE", "ALTER", "DROP")):
                told.append(f"{sql};")
            return self._inner.execute(sql, params, **how)

    def opening(dialect: Dialect, application: str) -> Connection:
        told.append(f"session {application}")
        return Session(connect(dialect, application))  # type: ignore[return-value]

    return opening


_HIDDEN = ("created_at", "committed_at", "rejected_at", "amendment")


def _content(place: Place, table: str) -> Iterator[list[object]]:
    """Rows as pairs of column and value; times and identities of tables differ."""
    session = place.session()
    cursor = session.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4, 5, 6")
    columns = [one[0] for one in cursor.description]
    for row in cursor.fetchall():
        yield [
            {
                name: f"<{name}>"
                if name in _HIDDEN or (name.endswith("_identity") and value)
                else value.decode()
                if isinstance(value, bytes)
                else value
                for name, value in zip(columns, row, strict=True)
            }
        ]
    session.close()


def in_topics(broker: Broker) -> Golden:
    """What the Kafka sink leaves: records, dead letters, ledger, offsets, transactional ids."""
    ids: set[str] = set()
    topics = _named_topics(broker)
    at = {T0: 0, T1: 5}
    first = topics.sink(run="run-1", connect=_recording_clients(ids))
    fence = first.open(Takeover(SOURCE, lambda: at, at)).fence
    first.bind()
    commit_all(first, chunk({T0: (0, [*RECORDS, Rec(5, bad="gone", value=None)])}), fence)  # type: ignore[arg-type]
    for kind, (start, end) in {"hole": (6, 7), "gap": (7, 9)}.items():
        pass_over(together(first), {T0: OffsetRange(start, end)}, fence, kind)  # type: ignore[arg-type]
    first.ledger.note(fence, Notes(leader_epochs={T0: 3}))
    first.ledger.note(fence, Notes(counted=RejectCount("1%", 4, 1)))
    replaytools.replayed(first, replaytools.judging(lambda one: one.offset == BAD.offset))
    first.close()
    batch = replace(topics.sink(run="run-2", connect=_recording_clients(ids)), by_batch=True)
    fence = batch.open(Takeover(SOURCE, lambda: at, at)).fence
    batch.bind()
    publish_all(batch, with_rows(_publication(), batch, sink_rows(first.form.schema)), fence)
    batch.close()
    last = topics.sink(run="run-3", connect=_recording_clients(ids))
    last.open(Takeover(SOURCE, lambda: at, at, reset=lambda _: {T0: 4}))
    last.close()
    hidden = _topic_ids(broker, [topics.output, topics.rejects])
    return {
        "kafka_ledger.jsonl": hide(lines(_by_key(topics.records(topics.ledger))), hidden),
        "kafka_records.jsonl": lines(map(message, topics.records(topics.output))),
        "kafka_dead_letters.jsonl": lines(map(message, topics.records(topics.rejects))),
        "kafka_offsets.jsonl": hide(
            lines(_offsets(broker, [topics.group, replay_group(topics.group)])), hidden
        ),
        "kafka_ids.txt": _numbered("".join(f"{one}\n" for one in sorted(ids))),
    }


def _named_topics(broker: Broker) -> kafkatools.Topics:
    _named_sources(broker)
    output, rejects = broker.create_topic("golden-out"), broker.create_topic("golden-out.rejects")
    return kafkatools.Topics(
        broker.bootstrap, "golden", output, rejects, "golden-ledger", group="oncely-golden"
    )


def in_files(broker: Broker, folder: Path) -> Golden:
    """What the files sink leaves: manifest, schemas, ledger, and what lies beside the files."""
    place = filestools.FilesPlace(broker.bootstrap, "golden-files", folder / "lake")
    _named_sources(broker)
    ids: set[str] = set()
    sink = place.sink(run="run-1", kafka=_recording_clients(ids))
    fence = filestools.open_sink(sink).fence
    for batch in range(2):
        start = batch * filestools.PER_TASK
        sink.begin_batch()
        staged = filestools.stage(sink, fence, batch, start)
        filestools.publish_all(sink, filestools.what(staged, start), fence)
    table = place.table()
    with table.manifest() as manifest:
        manifest.settled()  # a commit is visible a moment after its answer
    compact(
        replace(
            table, pipeline_topics=replace(table.pipeline_topics, connect=_recording_clients(ids))
        )
    )
    sink.replace_schema((), lambda _: None, fence)
    sink.close()
    read = lambda topic: kafkatools.messages(broker.bootstrap, topic)  # noqa: E731
    hidden = _topic_ids(broker, [f"{place.name}.manifest", f"{place.name}.schema"])
    hidden[place.root.as_uri()] = "<root>"
    about = sorted(one for one in (place.root / "_oncely").rglob("*") if one.is_file())
    own = [*about, place.root / "_READ_THE_MANIFEST.txt"]
    return {
        "files_manifest.jsonl": hide(
            _numbered(
                _of_bytes(lines([m.key(), m.value()] for m in read(f"{place.name}.manifest")))
            ),
            hidden,
        ),
        "files_dead_letters.jsonl": lines(map(message, read(f"{place.name}.rejects"))),
        "files_schemas.jsonl": lines([m.key(), m.value()] for m in read(f"{place.name}.schema")),
        "files_ledger.jsonl": hide(lines(_by_key(read(f"ledger-{place.name}"))), hidden),
        "files_root.txt": hide(
            _numbered(
                "".join(f"{one.relative_to(place.root)}: {one.read_text()}\n" for one in own)
            ),
            hidden,
        ),
        "files_ids.txt": "".join(f"{one}\n" for one in sorted(ids)),
    }


def in_delta(folder: Path) -> Golden:
    """What the Delta sink leaves: what its commits tell, its ledgers and its dead letters."""
    place = deltatools.DeltaPlace(folder / "table", "golden")
    sink = place.sink(run="run-1")
    fence = filestools.open_sink(sink).fence
    sink.begin_batch()
    filestools.publish_all(sink, filestools.what(filestools.stage(sink, fence)), fence)
    sink.ledger.note(fence, Notes(leader_epochs={T0: 3}, counted=RejectCount("1/100", 60, 1)))
    log = (place.root / "_delta_log").glob("*.json")
    actions = [json.loads(one) for file in sorted(log) for one in file.read_text().splitlines()]
    kept = [one["txn"] if "txn" in one else one["commitInfo"].get("oncely") for one in actions
            if one.keys() & {"txn", "commitInfo"}]  # fmt: skip
    for one in kept:
        (one or {}).pop("lastUpdated", None)
    found = (one for one in (place.root / "_oncely").rglob("*") if one.is_file())
    below = sorted(found, key=lambda one: int(one.stem))
    ledgers = [f"{one.relative_to(place.root)} {one.read_text()}\n" for one in below
               if one.suffix == ".json"]  # fmt: skip
    letters = [row for one in below if one.suffix == ".parquet"
               for row in pq.read_table(one).to_pylist()]  # fmt: skip
    versions = {str(one["version"]) for one in kept if one and "appId" in one}
    hidden = {one: f"<{int(one) >> 32} and 32 random bits>" for one in versions}
    for one in below:
        hidden.setdefault(one.stem, f"<{int(one.stem) >> 32} and 32 random bits>")
    whole = "".join(json.dumps(one) + "\n" for one in kept if one)
    return {
        "delta_commits.jsonl": hide(whole, hidden),
        "delta_ledgers.txt": hide("".join(ledgers), hidden),
        "delta_dead_letters.txt": "".join(f"{row}\n" for row in letters),
    }


def _named_sources(broker: Broker) -> None:
    """The broker takes offsets of topics that exist only."""
    for source in SOURCE.topic_ids:
        broker.ensure_topic(source, 4)


def _of_bytes(text: str) -> str:
    """What depends on the versions of the libraries that encode and compress rows."""
    text = re.sub(r'\\"bytes\\":\d+', r'\\"bytes\\":<bytes>', text)
    return re.sub(r'\\"sha256\\":\\"[0-9a-f]{64}', r'\\"sha256\\":\\"<sha256>', text)


def _recording_clients(ids: set[str]) -> Any:
    """Notes transactional ids and groups."""

    def making(kind: Any, *args: Any, **own: Any) -> Any:
        names = ("transactional.id", "group.id")
        ids.update(f"{name} {own[name]}" for name in names if name in own)
        return make(kind, *args, **own)

    return making


def _numbered(text: str) -> str:
    """Random names in the order in which they appear."""
    seen: dict[str, str] = {}

    def word(found: re.Match[str]) -> str:
        return seen.setdefault(found[0], f"<random {len(seen) + 1}>")

    return re.sub(r"(?<=-)([0-9a-f]{32}|[0-9a-f]{16})(?=\.arrow|-\d{6}\.|:)", word, text)


def _by_key(messages: Iterable[Any]) -> list[list[bytes]]:
    """Keys and values; partitions of a chunk are committed side by side, each in its order."""
    found = [[one.key(), one.value()] for one in messages]
    return sorted(found, key=lambda one: one[0])


def _offsets(broker: Broker, groups: Iterable[str]) -> Iterator[list[object]]:
    admin = broker.admin()
    for group in groups:
        asked = [ConsumerGroupTopicPartitions(group)]
        found = admin.list_consumer_group_offsets(asked)[group].result(120).topic_partitions
        for tp in sorted(found, key=lambda one: (one.topic, one.partition)):
            yield [group, tp.topic, tp.partition, tp.offset, tp.metadata]


def _topic_ids(broker: Broker, topics: Iterable[str]) -> dict[str, str]:
    admin = broker.admin()  # kept: a client that is collected never answers
    answers = admin.describe_topics(TopicCollection(list(topics)))
    return {str(one.result(120).topic_id): f"<id of {name}>" for name, one in answers.items()}


# -- texts -----------------------------------------------------------------------------------


def message(one: Any) -> list[object]:
    """Key, value and headers of a message of ours or of confluent-kafka's."""
    if isinstance(one, Message):
        return [one.key, one.value, *(one.headers or ())]
    return [one.key(), one.value(), *(one.headers() or ())]


def lines(records: Iterable[Iterable[object]]) -> str:
    """One record a line; bytes as the text that they are in UTF-8."""
    return "".join(
        json.dumps(list(one), ensure_ascii=False, default=_text) + "\n" for one in records
    )


def _text(value: object) -> str:
    assert isinstance(value, bytes), value
    return value.decode()


def hide(text: str, hidden: Mapping[str, str]) -> str:
    for one, word in hidden.items():
        text = text.replace(one, word)
    return text
