"""A record's fate does not depend on its neighbours.

The same records, committed in any chunks, make the same table and the same dead letters as when
each is committed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.sinktools import T0, Place, Rec, chunk, commit_all, ready, sink_to, trigger

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("name", pa.string())])
NAMES = (None, "a", "A", "a ", "b", "toolong")
ROW = st.fixed_dictionaries(
    {
        "id": st.integers(0, 3),
        "v": st.sampled_from([None, 0, 1, 2, 13]),
        "name": st.sampled_from(NAMES),
    }
)
ROWS = st.one_of(
    st.lists(ROW, min_size=1, max_size=1), st.just([]), st.lists(ROW, min_size=2, max_size=3)
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


def outcome(
    place: Place, to: tuple[Any, Any], records: Sequence[Rec], cuts: set[int], keys: Sequence[str]
) -> Any:
    """The table and the dead letters after the records were committed in chunks."""
    place.sql("DELETE FROM rows")
    place.sql('UPDATE oncely_positions SET "position" = 0')
    place.sql("DELETE FROM oncely_ranges")
    place.sql("DELETE FROM oncely_rejects")
    ends = [*sorted(cut for cut in cuts if cut < len(records)), len(records)]
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end:
            commit_all(to[0], chunk({T0: (start, records[start:end])}, SCHEMA, keys), to[1])
    rejects = place.sql('SELECT "offset", stage FROM oncely_rejects ORDER BY 1')
    return sorted(place.sql("SELECT * FROM rows"), key=repr), rejects


def check(place: Place, keys: Sequence[str] = (), version: str | None = None) -> None:
    """Any chunks do the same as one chunk a record."""
    to = ready(sink_to(place, SCHEMA, keys=keys, version=version))
    deletes = DELETES.map(lambda row: {key: row[key] for key in keys})
    record = ROWS.map(lambda rows: (rows, None))
    if keys:
        record = st.one_of(
            *[ROW.map(lambda row: ([row], None))] * 3, record, deletes.map(lambda key: ([], key))
        )

    @settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(record, min_size=2, max_size=10), st.sets(st.integers(1, 9)))
    def same(made: list[Any], cuts: set[int]) -> None:
        records = [Rec(n, rows, deletes=gone) for n, (rows, gone) in enumerate(made)]
        records = [replace(one, value=None) if one.deletes else one for one in records]
        alone = outcome(place, to, records, set(range(len(records))), keys)
        assert outcome(place, to, records, set(), keys) == alone
        assert outcome(place, to, records, cuts, keys) == alone

    same()


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
