"""Opening: epochs, positions for every partition, and refusing another source or table."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from oncely.core.claim import Fence, Takeover
from oncely.errors import TableMismatch, Unavailable
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    Place,
    at_t0,
    commit_all,
    numbered,
    open_sink,
    quoted,
    ready,
    sink_to,
    with_faults,
)


def test_pipelines_share_the_tables_and_nothing_else(place: Place) -> None:
    one, one_fence = ready(sink_to(place, pipeline="one"))
    other, other_fence = ready(sink_to(place, pipeline="other"), {T0: 50})
    commit_all(one, at_t0(0, numbered(0, 3)), one_fence)
    assert one.ledger.positions(one_fence)[T0].position == 3
    assert other.ledger.positions(other_fence)[T0].position == 50
    assert open_sink(other).fence.epoch == 2
    assert one.ledger.positions(one_fence)[T0].epoch == 1


def test_a_run_whose_answer_was_lost_finds_itself(place: Place) -> None:
    """It knows of epoch 1 only; epoch 2 is its own too, and no reason to call itself fenced."""
    sink = sink_to(place)
    open_sink(sink)

    def lose(name: str, call: Callable[[], Any]) -> Any:
        answer = call()
        if name == "commit":
            raise Unavailable("no answer")
        return answer

    with pytest.raises(Unavailable):
        open_sink(with_faults(sink, lose), expected=1)
    assert place.sql("SELECT epoch FROM oncely_pipelines") == [(2,)]
    assert open_sink(sink, expected=1).fence.epoch == 3


# -- tables --------------------------------------------------------------------------------


def tables(place: Place) -> set[str]:
    catalog = (
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        if place.is_postgres
        else "SELECT name FROM sqlite_master WHERE type = 'table'"
    )
    return {name for (name,) in place.sql(catalog)}


LEDGER = {
    "oncely_pipelines", "oncely_positions", "oncely_ranges", "oncely_rejects", "oncely_amendments",
}  # fmt: skip


def test_create_makes_table_and_ledger(place: Place) -> None:
    open_sink(sink_to(place))
    assert tables(place) == LEDGER | {"rows"}


def test_without_create_and_ledger_nothing_is_written(place: Place) -> None:
    if place.is_postgres:
        place.sql("CREATE TABLE rows (id bigint, name text)")
    else:
        place.sql("CREATE TABLE rows (id INTEGER, name TEXT) STRICT")
    with pytest.raises(TableMismatch, match=r"sink\.create is false") as caught:
        open_sink(sink_to(place, create=False))
    assert "oncely plan" in caught.value.way_out
    assert tables(place) == {"rows"}


def test_without_create_the_tables_that_plan_prints_are_enough(place: Place) -> None:
    sink = sink_to(place)
    open_sink(sink)
    fence = open_sink(sink_to(place, create=False)).fence
    assert fence.epoch == 2


def test_a_missing_table_is_named(place: Place) -> None:
    open_sink(sink_to(place))
    with pytest.raises(TableMismatch, match=r"there is no table .*other"):
        open_sink(sink_to(place, table="other", create=False, pipeline="q"))


def test_another_table_under_the_same_name_is_refused(place: Place) -> None:
    """It would begin where the old one ends; nothing is created for it."""
    open_sink(sink_to(place))
    with pytest.raises(TableMismatch, match=r"'other'.*has written to 'rows'") as caught:
        open_sink(sink_to(place, table="other"))
    assert "offsets reset" in caught.value.way_out
    assert tables(place) == LEDGER | {"rows"}
    assert open_sink(sink_to(place)).fence.epoch == 2
    assert open_sink(sink_to(place, table="other", pipeline="q")).fence.epoch == 1


def test_a_renamed_table_is_taken_up_by_a_reset(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    place.sql("ALTER TABLE rows RENAME TO renamed")
    renamed = sink_to(place, table="renamed")
    with pytest.raises(TableMismatch, match="has written to 'rows'"):
        open_sink(renamed)
    renamed.open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda positions: positions))
    bound, fence = ready(renamed)
    commit_all(bound, at_t0(2, numbered(2, 4)), fence)
    assert place.sql("SELECT id FROM renamed ORDER BY id") == [(0,), (1,), (2,), (3,)]
    with pytest.raises(TableMismatch, match="has written to 'renamed'"):
        open_sink(sink_to(place))


def test_what_does_not_fit_is_told_column_by_column(place: Place) -> None:
    if place.is_postgres:
        place.sql(
            "CREATE TABLE rows (id text, extra int NOT NULL, twice bigint"
            " GENERATED ALWAYS AS (2) STORED, filled int NOT NULL DEFAULT 1)"
        )
    else:
        place.sql(
            "CREATE TABLE rows (id TEXT, extra INT NOT NULL, twice INT"
            " GENERATED ALWAYS AS (2) STORED, filled INT NOT NULL DEFAULT 1) STRICT"
        )
    schema = pa.schema([*SCHEMA, ("twice", pa.int64())])
    with pytest.raises(TableMismatch) as caught:
        open_sink(sink_to(place, schema))
    text = caught.value.message
    assert "column 'id' is" in text
    assert "no column 'name'" in text
    assert "column 'extra' must have a value" in text
    assert "column 'twice' is generated" in text
    assert "filled" not in text
    assert "decode.schema" in caught.value.way_out


def test_an_upsert_needs_a_unique_constraint_on_its_keys(place: Place) -> None:
    sink = sink_to(place)
    open_sink(sink)
    with pytest.raises(TableMismatch, match=r"unique constraint on exactly \(id\)"):
        open_sink(sink_to(place, keys=["id"]))
    place.sql('CREATE UNIQUE INDEX "rows by id" ON rows (id) WHERE id > 5')
    place.sql('CREATE UNIQUE INDEX "rows by both" ON rows (id, name)')
    place.sql('CREATE UNIQUE INDEX "rows by sum" ON rows ((id + 1))')
    with pytest.raises(TableMismatch, match="unique constraint"):
        open_sink(sink_to(place, keys=["id"]))
    open_sink(sink_to(place, keys=["name", "id"]))
    place.sql('CREATE UNIQUE INDEX "rows by id only" ON rows (id)')
    open_sink(sink_to(place, keys=["id"]))


def test_keys_and_version_must_be_columns_of_the_rows(place: Place) -> None:
    sink = sink_to(place, keys=["id"])
    open_sink(sink)
    with pytest.raises(TableMismatch, match="no column 'missing'"):
        open_sink(sink_to(place, keys=["id"], version="missing"))


# -- what is particular to SQLite ----------------------------------------------------------


def test_sqlite_makes_no_file_without_create(on_sqlite: Place) -> None:
    with pytest.raises(TableMismatch, match="no database file"):
        open_sink(sink_to(on_sqlite, create=False))
    assert not on_sqlite.file.exists()


def test_sqlite_tasks_make_no_second_file(on_sqlite: Place) -> None:
    sink, fence = ready(sink_to(on_sqlite))
    on_sqlite.file.unlink()
    with pytest.raises(TableMismatch, match="no database file"):
        sink.ledger.positions(
            Fence("p", fence.epoch + 1)
        )  # a task in another process: a new session
    assert not on_sqlite.file.exists()


def test_sqlite_is_in_wal_mode_and_its_tables_are_strict(on_sqlite: Place) -> None:
    open_sink(sink_to(on_sqlite))
    assert on_sqlite.sql("PRAGMA journal_mode") == [("wal",)]
    strict = on_sqlite.sql("SELECT name FROM pragma_table_list WHERE strict AND schema = 'main'")
    assert {name for (name,) in strict} == LEDGER | {"rows"}
    with pytest.raises(sqlite3.IntegrityError, match="cannot store TEXT value"):
        on_sqlite.sql("INSERT INTO rows VALUES ('one', 'two')")


def test_sqlite_refuses_a_table_that_takes_any_type(on_sqlite: Place) -> None:
    on_sqlite.sql("CREATE TABLE rows (id INTEGER, name TEXT)")
    with pytest.raises(TableMismatch, match="not a STRICT table"):
        open_sink(sink_to(on_sqlite))
    on_sqlite.sql("CREATE VIEW seen AS SELECT * FROM rows")
    with pytest.raises(TableMismatch, match="not a STRICT table"):
        open_sink(sink_to(on_sqlite, table="seen"))


def test_sqlite_knows_the_schema_main_only(on_sqlite: Place) -> None:
    inside = Place(on_sqlite.url, "main")
    sink, fence = ready(sink_to(inside))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    assert on_sqlite.sql("SELECT COUNT(*) FROM rows") == [(2,)]
    with pytest.raises(TableMismatch, match="no schema 'public'"):
        open_sink(sink_to(Place(on_sqlite.url, "public")))


def test_sqlite_takes_an_integer_primary_key_that_fills_itself(on_sqlite: Place) -> None:
    on_sqlite.sql("CREATE TABLE rows (row_id INTEGER PRIMARY KEY, id INT, name TEXT) STRICT")
    sink, fence = ready(sink_to(on_sqlite))
    commit_all(sink, at_t0(0, numbered(5, 7)), fence)
    assert on_sqlite.sql("SELECT * FROM rows") == [(1, 5, "name 5"), (2, 6, "name 6")]


def test_a_file_that_is_no_database(on_sqlite: Place) -> None:
    on_sqlite.file.write_bytes(b"not a database at all, but long enough to have a header" * 20)
    with pytest.raises(Exception, match=r"no SQLite database|not a database") as caught:
        open_sink(sink_to(on_sqlite))
    assert getattr(caught.value, "exit_code", None) == 2


def test_postgres_without_a_schema_uses_the_search_path(on_postgres: Place) -> None:
    plain = Place(on_postgres.url)
    table = f"t_{on_postgres.schema}"
    sink, fence = ready(sink_to(plain, table=table, pipeline=table))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    assert plain_count(on_postgres, table) == 2


def plain_count(place: Place, table: str) -> int:
    return int(place.sql(f"SELECT COUNT(*) FROM public.{quoted(table)}")[0][0])
