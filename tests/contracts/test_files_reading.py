"""Files read by the manifest: rows, columns that grew, scopes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from oncely.decode.schema import large
from oncely.errors import ConfigError, DataLost, WrongInput
from oncely.kinds.files.table import listing, rows
from oncely.testing.servers.kafka import Broker
from tests.laketools import COLUMNS, T0, Lake, events, lake, lake_in_memory

INSIDE = pa.struct({"x": pa.float64(), "y": pa.string()})
GROWN = pa.schema([*COLUMNS, ("n", pa.float64()), ("at", INSIDE), ("tags", pa.list_(INSIDE))])
OLD = pa.struct({"x": pa.int64()})
NARROW = pa.schema([*COLUMNS, ("n", pa.int64()), ("at", OLD), ("tags", pa.list_(OLD))])


@pytest.fixture
def own(tmp_path: Path) -> Lake:
    return lake_in_memory(tmp_path)


@pytest.fixture
def real(broker: Broker, tmp_path: Path) -> Lake:
    """With topics."""
    return lake(broker, tmp_path)


def read(own: Lake, **more: object) -> list[dict[str, object]]:
    own.topics.reader().settled()  # the last marker
    _, parts = rows(own.table, **more)  # type: ignore[arg-type]
    return [row for part in parts for row in part.to_pylist()]


def by_id(found: list[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(found, key=lambda row: row["id"])


@pytest.mark.parametrize("form", ["avro", "parquet"])
def test_rows_of_all_files(own: Lake, form: str) -> None:
    own.batch_of(events("ann", 0, 3), events("bob", 3, 2), form=form)
    own.batch_of(events("ann", 5, 1), events(None, 6, 1), form=form)
    assert by_id(read(own)) == own.rows
    assert by_id(read(own, where={"user": "ann"})) == [r for r in own.rows if r["user"] == "ann"]
    assert read(own, where={"user": None}) == [own.rows[-1]]
    assert read(own, where={"user": "nobody"}) == []
    assert read(own, where={"user": "bob"}, columns=["id"]) == [{"id": 3}, {"id": 4}]


def test_what_the_manifest_does_not_name_is_not_read(real: Lake) -> None:
    real.batch_of(events("ann", 0, 3))
    real.file(events("ann", 100, 5))  # staged, never published
    with real.topics.transaction() as producer:
        real.topics.send(producer, [real.file(events("ann", 200, 5))])
        producer.abort_transaction(20)
    assert by_id(read(real)) == real.rows
    real.topics.publish(removed=[file for file in real.topics.reader().settled().files])
    assert read(real) == []


def test_files_of_older_schemas_resolve_to_the_published_one(own: Lake) -> None:
    old = {"id": 1, "user": "ann", "ts": T0, "n": 2, "at": {"x": 3}, "tags": [{"x": 4}, None]}
    none = {"id": 2, "user": "ann", "ts": T0, "n": None, "at": None, "tags": None}
    new = {"id": 3, "user": "ann", "ts": T0, "n": 2.5, "at": {"x": 3.5, "y": "z"},
           "tags": [{"x": 4.5, "y": "w"}]}  # fmt: skip
    own.publish([own.file(events("ann", 0, 1))], [COLUMNS])
    own.publish([own.file([old, none], NARROW)], [NARROW])
    own.publish([own.file([new], GROWN)], [GROWN])
    assert by_id(read(own)) == [
        {**none, "id": 0},
        {**old, "n": 2.0, "at": {"x": 3.0, "y": None}, "tags": [{"x": 4.0, "y": None}, None]},
        none,
        new,
    ]


def test_names_that_avro_does_not_have(own: Lake) -> None:
    schema = pa.schema([*COLUMNS, ("a b", pa.list_(pa.struct({"ü.": pa.string()})))])
    from oncely.decode.avro_schema import avro_name

    row = {"id": 1, "user": "ann", "ts": T0}
    spelled = {**row, avro_name("a b"): [{avro_name("ü."): "x"}]}
    own.publish([own.file([spelled], schema)], [schema])
    assert read(own) == [{**row, "a b": [{"ü.": "x"}]}]


def test_scopes_whose_schemas_conflict(own: Lake) -> None:
    texts = pa.schema([*COLUMNS, ("v", pa.string())])
    numbers = pa.schema([*COLUMNS, ("v", pa.int64())])
    ann, bob = {**events("ann", 0, 1)[0], "v": "x"}, {**events("bob", 1, 1)[0], "v": 7}
    own.publish(
        [own.file([ann], texts, scope=("ann",)), own.file([bob], numbers, scope=("bob",))],
        [(("ann",), texts), (("bob",), numbers)],
    )
    with pytest.raises(ConfigError, match=r"columns: .*'bob'.*'ann'.* differ: v: ") as refused:
        read(own)
    assert "where" in refused.value.way_out
    assert read(own, where={"user": "ann"}) == [ann]
    assert read(own, columns=["id"]) == [{"id": 0}, {"id": 1}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"where": {"hour": "1"}}, "where: 'hour' is no partition column; there are user, date"),
        ({"columns": ["nope"]}, "columns: no file that is read has a column 'nope'"),
        ({"columns": []}, "columns: none is named"),
        ({"columns": "id"}, "columns: found a text"),
    ],
)
def test_what_is_not_there(own: Lake, given: dict[str, object], said: str) -> None:
    own.batch_of(events("ann", 0, 1))
    with pytest.raises(ConfigError) as refused:
        read(own, **given)
    assert said in refused.value.message
    assert refused.value.way_out


def test_a_file_that_was_changed_or_is_gone(own: Lake) -> None:
    changed, gone = own.batch_of(events("ann", 0, 3), events("bob", 3, 1))
    data = bytearray(own.table.store.read(changed.path))
    data[-20] ^= 1
    (own.root / changed.path).write_bytes(data)
    with pytest.raises(DataLost, match=f"{changed.path}: its SHA-256 is"):
        read(own, where={"user": "ann"})
    (own.root / gone.path).unlink()
    with pytest.raises(DataLost, match="the store does not have it"):
        read(own, where={"user": "bob"})


def test_a_pipeline_that_never_wrote(real: Lake) -> None:
    with pytest.raises(ConfigError, match=r"sink\.manifest_topic: .*nothing was published yet"):
        listing(real.with_(manifest_topic="no-such-topic").table)


def test_listing(real: Lake) -> None:
    real.batch_of(events("ann", 0, 3), events("bob", 3, 2))
    real.topics.reader().settled()
    found = listing(real.table, {"user": "bob"})
    assert (found.rows, found.total, len(found.files)) == (2, 2, 1)
    assert found.as_json()["files"][0]["partition"] == {"user": "bob", "date": "2023-11-14"}
    assert listing(real.table).bytes == sum(p.stat().st_size for p in real.root.rglob("*.avro"))


LONG, FLOATING = (pa.schema([*COLUMNS, ("n", one)]) for one in (pa.int64(), pa.float64()))
LARGE = 9_007_199_254_740_993  # no DOUBLE equals it


def test_a_number_that_the_published_type_would_round_is_not_read_in_silence(own: Lake) -> None:
    """Versions before this one widened a column although files held such a number."""
    row = {"id": 1, "user": "ann", "ts": T0}
    own.publish([own.file([{**row, "n": LARGE}], LONG)], [LONG])
    own.publish([own.file([{**row, "n": 1.5}], FLOATING)], [FLOATING])
    with pytest.raises(WrongInput, match=f"n: {LARGE} does not fit DOUBLE") as refused:
        read(own)
    assert "rounding" in refused.value.way_out
    assert read(own, columns=["id"]) == [{"id": 1}, {"id": 1}]
    found = [one["n"] for one in read(own, columns=["n"], rounding="allow")]
    assert sorted(found) == [1.5, float(LARGE)]


def test_scopes_whose_numbers_have_no_common_type_are_not_read_in_silence(own: Lake) -> None:
    row = {"id": 1, "ts": T0}
    held = pa.schema([*COLUMNS, large("n")])
    ann = own.file([{**row, "user": "ann", "n": LARGE}], LONG, scope=("ann",))
    bob = own.file([{**row, "user": "bob", "n": 1.5}], FLOATING, scope=("bob",))
    own.publish([ann, bob], [(("ann",), held), (("bob",), FLOATING)])
    assert read(own, where={"user": "ann"}, columns=["n"]) == [{"n": LARGE}]
    with pytest.raises(ConfigError, match=r"beyond 2\^53, found DOUBLE"):
        read(own)
    found = [one["n"] for one in read(own, columns=["n"], rounding="allow")]
    assert sorted(found) == [1.5, float(LARGE)]
