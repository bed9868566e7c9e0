"""Errors of PostgreSQL that trying again can't mend end the run at once, with a way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pytest

from oncely.commit.change import RecordsToRepair, repair, rewrite
from oncely.core.claim import Entry
from oncely.core.ranges import OffsetRange
from oncely.errors import OncelyError, Stopped, TableMismatch, TooLong, Unavailable, WrongInput
from oncely.kinds.sql.change import SqlRewrites
from oncely.kinds.sql.destination import check_table
from oncely.stores.sql.connection import BadData, Contention, close_all
from oncely.testing.servers.postgres import Postgres
from tests.contracts.looking import create, ids, rejected
from tests.sinktools import (
    T0,
    Place,
    Rec,
    at_t0,
    commit_all,
    commit_on,
    gone,
    impatient,
    numbered,
    postgres_place,
    ready,
    rec,
    sink_to,
    trigger,
)

MEANINGS: dict[type[Exception], str] = {
    WrongInput: "0A000 0L000 0P000 21000 28000 2BP01 3D000 42501 42883 54011 55000 55006 F0000",
    TableMismatch: "3F000 42P01 42703 42804",
    Stopped: "25001 2D000 XX001 XX002",
    BadData: "09000 20000 22012 23505 27000 2F005 34000 38001 39000 42601 44000 45000 54000 54001"
    " HV000 P0001 P0002 P0003 P0004 U0001 XX000",
    Contention: "40001 40P01 55P03",
    Unavailable: "08006 25006 53100 53300 57P01 58030 58P01 58P02 72000",
    TooLong: "57014 25P04",
}


@pytest.mark.parametrize("kind", MEANINGS, ids=lambda kind: kind.__name__)
def test_each_sqlstate_means_one_thing(on_postgres: Place, kind: type[Exception]) -> None:
    with closing(on_postgres.dialect.connect("test")) as session:
        for state in MEANINGS[kind].split():
            with pytest.raises(kind) as caught:
                session.execute(
                    f"DO $$ BEGIN RAISE EXCEPTION 'because' USING ERRCODE = '{state}'; END $$",
                    of_rows=True,
                )
            assert type(caught.value) is kind, state
            assert "because" in str(caught.value)
            if isinstance(caught.value, OncelyError):
                assert not isinstance(caught.value, WrongInput | Stopped) or caught.value.way_out


BY_NO_ROW = {
    "positions": "BEFORE UPDATE ON oncely_positions",
    "history": "BEFORE INSERT ON oncely_ranges",
    "dead letters": "BEFORE INSERT ON oncely_rejects",
}


@pytest.mark.parametrize("state", ["XX000", "58P01", "53100", "57P05"])
@pytest.mark.parametrize("statement", BY_NO_ROW)
def test_an_error_of_the_server_in_a_statement_of_the_ledger_is_tried_again(
    on_postgres: Place, statement: str, state: str
) -> None:
    """It ends no run, and no record becomes a dead letter."""
    sink, fence = ready(sink_to(on_postgres))
    raised = f"RAISE 'because' USING ERRCODE = '{state}';"
    fails = trigger(on_postgres, raised, BY_NO_ROW[statement])
    chunk = at_t0(0, [*numbered(0, 3), Rec(3, bad="no JSON")])
    with pytest.raises(Unavailable, match="because"):
        commit_on(sink, chunk, {T0: Entry(0, fence.epoch, run=fence.run)}, fence)
    on_postgres.sql(f"DROP FUNCTION {fails} CASCADE")
    commit_all(sink, chunk, fence)
    assert (ids(on_postgres), rejected(on_postgres)) == ([0, 1, 2], [(3, "no JSON")])


def test_a_file_that_the_server_lacks_makes_no_dead_letters(on_postgres: Place) -> None:
    """As of an extension's library, which would refuse every row."""
    create(on_postgres, "id bigint, name text")
    sink, fence = ready(sink_to(on_postgres))
    refusing(on_postgres, "RAISE 'because' USING ERRCODE = '58P01'")
    with pytest.raises(Unavailable, match="because"):
        commit_on(sink, at_t0(0, numbered(0, 3)), {T0: Entry(0, fence.epoch, run=fence.run)}, fence)
    assert (ids(on_postgres), rejected(on_postgres)) == ([], [])


ALL = "CREATE POLICY every ON rows USING (true)"


@pytest.fixture
def guarded(on_postgres: Place) -> Iterator[Place]:
    """The same schema for a role without privileges beyond it, which row-level security binds."""
    role = f"role_{on_postgres.schema}"
    on_postgres.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'pw'")
    on_postgres.sql(f"GRANT ALL ON SCHEMA {on_postgres.schema} TO {role}")
    parts = urlsplit(on_postgres.url)
    server = parts.netloc.rpartition("@")[2]
    yield replace(on_postgres, url=urlunsplit(parts._replace(netloc=f"{role}:pw@{server}")))
    on_postgres.sql(f"DROP OWNED BY {role}")
    on_postgres.sql(f"DROP ROLE {role}")


def secured(place: Place, columns: str, *policies: str) -> None:
    """A table whose policies bind the role."""
    place.sql(f"CREATE TABLE rows ({columns})")
    place.sql("ALTER TABLE rows ENABLE ROW LEVEL SECURITY")
    place.sql(f"GRANT ALL ON rows TO role_{place.schema}")
    for one in policies:
        place.sql(one.format(role=f"role_{place.schema}"))


@pytest.mark.parametrize(
    ("columns", "keys", "seen"),
    [
        ("id bigint, name text", (), "id < 2"),
        ("id bigint PRIMARY KEY, name text", ("id",), "true"),
    ],
    ids=["append", "upsert"],
)
def test_a_row_that_a_policy_refuses_ends_the_run(
    on_postgres: Place, guarded: Place, columns: str, keys: tuple[str, ...], seen: str
) -> None:
    """There is no COPY under row-level security: the rows that policies pass are written."""
    secured(on_postgres, columns, f"CREATE POLICY few ON rows USING ({seen}) WITH CHECK (id < 2)")
    sink, fence = ready(sink_to(guarded, keys=keys))
    assert any("row-level security" in one for one in sink.target.notes)
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    with pytest.raises(WrongInput, match="violates row-level security policy") as caught:
        commit_all(sink, at_t0(2, numbered(2, 5)), fence)
    assert "BYPASSRLS" in caught.value.way_out
    assert ids(on_postgres) == [0, 1]
    assert rejected(on_postgres) == []


def test_an_append_that_no_policy_permits_is_refused(on_postgres: Place, guarded: Place) -> None:
    secured(
        on_postgres, "id bigint, name text", "CREATE POLICY seen ON rows FOR SELECT USING (true)"
    )
    for refusing in (check_table, ready):
        with pytest.raises(TableMismatch, match="has no policy by which"):
            refusing(sink_to(guarded))


def test_a_ledger_under_row_level_security_is_refused(on_postgres: Place, guarded: Place) -> None:
    """It would look empty, as before a first start."""
    secured(on_postgres, "id bigint, name text", ALL)
    sink, _ = ready(sink_to(guarded))
    on_postgres.sql(
        "ALTER TABLE oncely_positions ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
    )
    for refusing in (check_table, ready):
        with pytest.raises(TableMismatch, match=r"row-level security of .*oncely_positions"):
            refusing(sink)


HIDDEN = r"row-level security of .*rows may hide rows"


@pytest.mark.parametrize(
    "policies",
    [
        [],
        ["CREATE POLICY few ON rows USING (id <> 1) WITH CHECK (true)"],
        [ALL, "CREATE POLICY not_one ON rows AS RESTRICTIVE FOR SELECT USING (id <> 1)"],
        [ALL, "CREATE POLICY not_one ON rows AS RESTRICTIVE FOR DELETE TO {role} USING (id <> 1)"],
        [f"{ALL.replace(' USING', ' FOR SELECT USING')}"],
        ["CREATE POLICY others ON rows TO pg_monitor USING (true)"],
        ["CREATE POLICY written ON rows WITH CHECK (true)"],
    ],
    ids=["none", "few", "select", "delete", "select alone", "another role", "check alone"],
)
def test_an_upsert_into_rows_that_a_policy_hides_is_refused(
    on_postgres: Place, guarded: Place, policies: list[str]
) -> None:
    """A tombstone's DELETE would leave a hidden row, without an error."""
    secured(on_postgres, "id bigint PRIMARY KEY, name text", *policies)
    sink = sink_to(guarded, keys=["id"])
    with pytest.raises(TableMismatch, match=HIDDEN):
        check_table(sink)
    with pytest.raises(TableMismatch, match=HIDDEN) as caught:
        ready(sink)
    assert "BYPASSRLS" in caught.value.way_out


@pytest.mark.parametrize(
    "policies",
    [
        [ALL],
        ["CREATE POLICY ours ON rows TO {role} USING (true)"],
        ["CREATE POLICY none ON rows USING (false)", ALL],
        [ALL, "CREATE POLICY others ON rows AS RESTRICTIVE TO pg_monitor USING (false)"],
        [ALL, "CREATE POLICY written ON rows AS RESTRICTIVE WITH CHECK (id < 10)"],
        ["ALTER TABLE rows DISABLE ROW LEVEL SECURITY"],
        ["ALTER ROLE {role} BYPASSRLS"],
    ],
    ids=["all", "the role", "one of two", "others", "check alone", "disabled", "bypass"],
)
def test_an_upsert_where_policies_hide_nothing_deletes(
    on_postgres: Place, guarded: Place, policies: list[str]
) -> None:
    secured(on_postgres, "id bigint PRIMARY KEY, name text", *policies)
    sink, fence = ready(sink_to(guarded, keys=["id"]))
    commit_all(sink, at_t0(0, numbered(0, 3), keys=["id"]), fence)
    commit_all(sink, at_t0(3, [gone(3, id=1)], keys=["id"]), fence)
    assert ids(on_postgres) == [0, 2]


def test_keys_that_a_trigger_makes_equal(on_postgres: Place) -> None:
    """One statement may not affect a row twice (class 21): with a trigger each row has its own."""
    create(on_postgres, "name text PRIMARY KEY, id bigint")
    trigger(on_postgres, "NEW.name := lower(NEW.name); RETURN NEW;")
    sink, fence = ready(sink_to(on_postgres, keys=["name"]))
    both = [rec(0, id=0, name="a"), rec(1, id=1, name="A")]
    commit_all(sink, at_t0(0, both, keys=["name"]), fence)
    assert ids(on_postgres) == [1]


def test_rows_that_a_view_s_check_option_refuses_are_rejects(on_postgres: Place) -> None:
    """Class 44 speaks of a row, as a CHECK of the table does."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    create(on_postgres, "id bigint, name uuid", "kept")
    on_postgres.sql("CREATE VIEW rows AS SELECT * FROM kept WHERE id < 3 WITH CHECK OPTION")
    sink, fence = ready(sink_to(on_postgres, schema))
    records = [rec(n, id=n, name=f"6d0f0a4e-0000-4000-8000-{n:012}") for n in range(40)]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert ids(on_postgres) == [0, 1, 2]
    assert [offset for offset, _ in rejected(on_postgres)] == list(range(3, 40))


RAISED = {
    "custom": "RAISE 'because' USING ERRCODE = 'U0001'",
    "default": "RAISE 'because'",
    "no data": "SELECT id INTO STRICT NEW.id FROM rows WHERE false",
    "assertion": "ASSERT false, 'because'",
}


def refusing(place: Place, statement: str) -> None:
    """A trigger that raises an error for each third row."""
    trigger(place, f"IF NEW.id % 3 = 1 THEN {statement}; END IF; RETURN NEW;")


@pytest.mark.parametrize(
    ("raised", "keys", "records"),
    [*((one, (), 3) for one in RAISED), ("custom", (), 120), ("custom", ("id",), 3)],
)
def test_what_a_trigger_raises_of_a_row_makes_its_record_a_dead_letter(
    on_postgres: Place, raised: str, keys: tuple[str, ...], records: int
) -> None:
    create(on_postgres, f"id bigint{' PRIMARY KEY' if keys else ''}, name text")
    sink, fence = ready(sink_to(on_postgres, keys=keys))
    refusing(on_postgres, RAISED[raised].replace("rows", f"{on_postgres.schema}.rows"))
    commit_all(sink, at_t0(0, numbered(0, records), keys=keys), fence)
    assert ids(on_postgres) == [n for n in range(records) if n % 3 != 1]
    letters = rejected(on_postgres)
    assert [offset for offset, _ in letters] == list(range(1, records, 3))
    assert all(reason for _, reason in letters)


def test_what_a_trigger_raises_of_a_deletion_leaves_its_record(on_postgres: Place) -> None:
    """It is named with the text; a backfill ends, by no error of the driver's kind."""
    sink, fence = ready(sink_to(on_postgres, keep_source=True))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    raised = "RAISE 'no deletions' USING ERRCODE = 'U0001';"
    trigger(on_postgres, raised, "BEFORE DELETE ON rows")
    damage = RecordsToRepair(T0, [1], set(), at_t0(1, numbered(1, 2)))
    done = repair(SqlRewrites(sink), damage, impatient())
    assert done.refused.keys() == {(T0, 1)}
    assert "no deletions" in done.refused[T0, 1]
    whole = [OffsetRange(0, 3)]
    with pytest.raises(Stopped, match="no deletions") as caught:
        rewrite(SqlRewrites(sink), "backfill", T0, whole, at_t0(0, numbered(0, 3)), impatient())
    assert "trigger" in caught.value.way_out
    assert ids(on_postgres) == [0, 1, 2]


@pytest.mark.servers
def test_a_standby_is_waited_for() -> None:
    """It refuses unlogged tables by 0A000, which a primary refuses for good."""
    with Postgres() as server:
        place = postgres_place(server.url())
        sink, fence = ready(sink_to(place))
        server.stop()
        (server.directory / "data" / "standby.signal").touch()
        server.start()
        close_all()
        with pytest.raises(Unavailable, match="is a standby") as caught:
            commit_on(
                sink, at_t0(0, numbered(0, 5)), {T0: Entry(0, fence.epoch, run=fence.run)}, fence
            )
        assert "target_session_attrs" in caught.value.way_out
        place.sql("SELECT pg_promote()")
        commit_all(sink, at_t0(0, numbered(0, 5)), fence)
        assert ids(place) == list(range(5))
        close_all()
