"""Verify: what is wrong with a table is found, whatever it is, and nothing else is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from oncely.kinds.data_file import SourceRange
from oncely.kinds.files.compact import compact
from oncely.kinds.files.maintenance import vacuum
from oncely.kinds.files.verify import Verified, verify
from oncely.stores.objects.store import Store
from oncely.testing.servers.kafka import Broker
from tests.laketools import COLUMNS, T0, Lake, bytes_of, events, lake, lake_in_memory

change = msgspec.structs.replace


@pytest.fixture
def own(tmp_path: Path) -> Lake:
    return lake_in_memory(tmp_path)


@pytest.fixture
def real(broker: Broker, tmp_path: Path) -> Lake:
    """With topics, for what compaction, resets and other writers leave in them."""
    return lake(broker, tmp_path)


def problems(own: Lake) -> list[str]:
    return [one.text for one in verify(own.table).problems]


def test_a_good_table(real: Lake) -> None:
    real.batch_of(events("ann", 0, 3), events("../etc", 3, 2), events("", 5, 1), events(None, 6, 1))
    real.batch_of(events("ann", 7, 3, T0 + 86_400_000), form="parquet")
    unnamed = real.file(events("ann", 100, 1))
    seen: list[tuple[int, int]] = []
    found = verify(real.table, lambda *at: seen.append(at))
    size = sum(p.stat().st_size for p in real.root.rglob("events-*")) - unnamed.bytes
    assert found == Verified(5, 10, size, 0, 1, unnamed.bytes, ())
    assert found.as_json()["ok"] is True
    assert seen == [(i, 5) for i in range(1, 6)]


def test_bytes_that_differ(own: Lake) -> None:
    one, two, three = own.batch_of(events("ann", 0, 1), events("bob", 1, 1), events("cy", 2, 1))
    data = bytearray((own.root / one.path).read_bytes())
    data[len(data) // 2] ^= 1
    (own.root / one.path).write_bytes(data)
    (own.root / two.path).write_bytes(b"short")
    (own.root / three.path).unlink()
    found = {
        p.path: p.text for p in verify(own.table).problems if "SHA" in p.text or "not" in p.text
    }
    assert "SHA-256" in found[one.path]
    assert "SHA-256" in found[two.path]
    assert found[three.path] == "it is not in the store"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": 4}, "it has 3 rows, and 4 were published"),
        ({"bytes": 1}, "and 1 were published"),
        ({"event_time": None}, "its event times span"),
        ({"event_time": ("2023-11-14T22:13:20Z", "2023-11-14T22:13:21Z")}, "its event times span"),
        ({"partition": {"user": "bob", "date": "2023-11-14"}}, "it contains rows of ('ann'"),
        ({"partition": {"user": "bob", "date": "2023-11-14"}}, "it is not in the directory"),
        ({"ranges": [SourceRange("events", 0, 3, 3)]}, "is empty"),
        ({"scope": ("ann",)}, "no schema is published for its scope ['ann']"),
    ],
)
def test_a_manifest_that_is_wrong(own: Lake, wrong: dict[str, object], said: str) -> None:
    own.publish([change(own.file(events("ann", 0, 3)), **wrong)])
    assert any(said in text for text in problems(own))


def test_columns_that_don_t_resolve(own: Lake) -> None:
    text = pa.schema([("id", pa.string()), *list(COLUMNS)[1:]])
    rows = [{**row, "id": "x"} for row in events("ann", 0, 1)]
    more = pa.schema([*COLUMNS, ("more", pa.string())])
    held = [{**row, "more": "x"} for row in events("ann", 0, 1)]
    own.publish([own.file(rows, text), own.file(held, more)])
    found = problems(own)
    assert any("don't resolve to the published schema: id" in one for one in found)
    assert any("column 'more' is not in the published schema" in one for one in found)


def test_bytes_that_are_no_file(own: Lake) -> None:
    file = own.file(events("ann", 0, 1))
    (own.root / file.path).write_bytes(b"text")
    own.publish([change(file, bytes=4, sha256=hashlib.sha256(b"text").hexdigest())])
    assert any("no Avro file" in one for one in problems(own))


def test_rows_of_two_directories(own: Lake) -> None:
    rows = [*events("ann", 0, 1), *events("bob", 1, 1)]
    own.publish([own.file(rows)])
    assert any("rows of ('bob'" in one for one in problems(own))


def test_numbers_that_became_doubles_keep_their_directory(tmp_path: Path) -> None:
    own = lake_in_memory(tmp_path, partition_by=("user", "date(ts)"))
    wide = pa.schema([("id", pa.int64()), ("user", pa.float64()), ("ts", pa.float64())])
    whole = pa.schema([("id", pa.int64()), ("user", pa.int64()), ("ts", pa.int64())])
    row = {"id": 1, "user": 7, "ts": T0}
    file = own.file([row], whole)
    data = bytes_of([row], wide)
    (own.root / file.path).write_bytes(data)
    sha = hashlib.sha256(data).hexdigest()
    own.publish([change(file, bytes=len(data), sha256=sha)], [wide])
    assert problems(own) == []


def doubled(own: Lake, **later: object) -> list[str]:
    """The same records in two files."""
    own.publish([own.file(events("ann", 0, 10), start=0)])
    for key, value in later.items():
        setattr(own, key, value)
    own.publish([own.file(events("ann", 5, 10), start=5)])
    return problems(own)


def test_records_in_two_batches(own: Lake) -> None:
    (found,) = doubled(own)
    first = min(own.paths(), key=lambda path: own.topics.settled().files[path].batch)
    assert found == f"offsets 5 to 10 of events-0 are in {first} too"


def test_records_in_two_epochs(own: Lake) -> None:
    assert len(doubled(own, epoch=2)) == 1


def test_a_reset_reads_records_again(real: Lake) -> None:
    real.register(resets={2: 5})
    assert doubled(real, epoch=2) == []


def test_a_reset_that_led_behind_them_does_not(real: Lake) -> None:
    real.register(resets={2: 6})
    assert len(doubled(real, epoch=2)) == 1


def test_a_record_whose_rows_were_cut(own: Lake) -> None:
    files = [own.file(events("ann", 0, 10), start=0), own.file(events("ann", 9, 5), start=9)]
    own.publish(files)
    assert problems(own) == []


def test_rows_that_a_transform_has_mixed(real: Lake) -> None:
    """Files of one batch have all of its ranges; those of two batches share none."""
    ranges = [SourceRange("events", 0, 0, 50), SourceRange("events", 1, 0, 50)]
    real.publish([real.file(events("ann", i, 1), mixed=True, ranges=ranges) for i in range(2)])
    assert problems(real) == []
    real.publish([real.file(events("ann", 7, 1), mixed=True, ranges=ranges)])
    assert len(problems(real)) == 4
    compact(real.table)
    assert problems(real) == []


def test_replayed_letters_lie_in_ranges_of_others(real: Lake) -> None:
    real.publish([real.file(events("ann", 0, 10), start=0)])
    real.batch = -1
    replayed = real.file(events("ann", 5, 1), start=5)
    real.publish([replayed, real.file(events("ann", 6, 2), start=6)])
    assert "-b-1-" in replayed.path
    assert problems(real) == []
    real.batch = -1
    real.age(real.file(events("ann", 100, 1)).path, 100_000)
    assert compact(real.table).outputs == 1
    assert problems(real) == []
    assert [("-b-1-" in one.path) for one in vacuum(real.table).orphans] == [True]


def test_files_that_left_meanwhile_are_nobody_s_problem(
    real: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone,) = real.batch_of(events("ann", 0, 1))
    (real.root / gone.path).unlink()
    read = Store.read

    def removed_meanwhile(store: Store, path: str) -> bytes:
        real.topics.publish(removed=[gone.path])
        real.topics.reader().settled()
        return read(store, path)

    monkeypatch.setattr(Store, "read", removed_meanwhile)
    assert problems(real) == []


def test_files_of_an_older_partitioning(own: Lake) -> None:
    own.batch_of(events("ann", 0, 1))
    found = verify(own.with_(partition_by=("user",)).table)
    assert (found.other_levels, found.problems) == (1, ())
