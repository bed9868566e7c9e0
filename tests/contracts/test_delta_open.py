"""Opening a Delta table's ledger: epochs, positions, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction

from oncely.audit.stored.delta_document import read_document
from oncely.core.claim import Entry
from oncely.errors import ConfigError, NewerFormat, OlderFormat, Stopped, TableMismatch, Unavailable
from oncely.stores.delta import DeltaTables
from oncely.stores.objects.store import Store
from tests.deltatools import Committing, DeltaPlace, make_place
from tests.sinktools import SCHEMA, T0, T1, at_t0, commit_all, numbered, open_sink, ready


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    return make_place(tmp_path)


def run_of(place: DeltaPlace, **more: Any) -> Any:
    return Committing(place.sink(**more))


def never() -> Any:
    raise AssertionError("start is asked once in a pipeline's life")


def test_pipelines_share_the_table_and_nothing_else(place: DeltaPlace) -> None:
    one, fence = ready(run_of(place))
    two, other = ready(run_of(DeltaPlace(place.root, "q")), {T0: 5})
    commit_all(one, at_t0(0, numbered(0, 3)), fence)
    commit_all(two, at_t0(5, numbered(5, 7)), other)
    assert one.ledger.positions(fence)[T0].position == 3
    assert two.ledger.positions(other)[T0].position == 7
    assert place.ids() == [0, 1, 2, 5, 6]


class LosesAnswers(DeltaTables):
    """The first commit is made, and nobody hears of it."""

    lost = False

    def commit(self, table: Any, change: Any) -> None:
        super().commit(table, change)
        if not type(self).lost:
            type(self).lost = True
            raise Unavailable("no answer")


def test_a_run_whose_answer_was_lost_finds_itself(place: DeltaPlace) -> None:
    class Losing(LosesAnswers):
        pass

    sink = place.sink()
    open_sink(sink)
    sink.connect = Losing
    with pytest.raises(Unavailable):
        open_sink(sink, expected=1)
    assert open_sink(sink, expected=1).fence.epoch == 3


def test_a_commit_whose_answer_was_lost_is_not_made_again(place: DeltaPlace) -> None:
    class Losing(LosesAnswers):
        pass

    sink, fence = ready(run_of(place))
    sink.inner.connect = Losing
    (outcome,) = commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert outcome.replayed
    assert place.ids() == [0, 1, 2]


# -- positions outlive the log -------------------------------------------------------------


def test_positions_outlive_checkpoints_and_the_cleanup_of_the_log(place: DeltaPlace) -> None:
    sink, fence = ready(run_of(place), {T0: 0, T1: 4})
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    foreign = place.table
    foreign.update(updates={"name": "'x'"}, predicate="id = 1")
    foreign.optimize.compact()
    foreign = place.table
    foreign.create_checkpoint()
    log = place.root / "_delta_log"
    for one in log.glob("*.json"):  # as Delta does when the log's retention has passed
        if int(one.name[:20]) < foreign.version():
            os.unlink(one)
    assert place.told() == [], "no commit of ours is in the history any more"
    assert sink.ledger.positions(fence) == {
        T0: Entry(5, 1, run=sink.run),
        T1: Entry(4, 1, run=sink.run),
    }
    commit_all(sink, at_t0(5, numbered(5, 6)), fence)
    assert place.ids() == [0, 1, 2, 3, 4, 5]


def test_a_ledger_that_is_gone_is_not_begun_anew(place: DeltaPlace) -> None:
    open_sink(place.sink())
    for one in (place.root / "_oncely").rglob("*.json"):
        one.unlink()
    with pytest.raises(Stopped, match="which is gone") as caught:
        open_sink(place.sink())
    assert "restore it" in caught.value.way_out


def test_tidying_leaves_the_newest_ledger_and_attempts_that_may_become_one(
    place: DeltaPlace,
) -> None:
    sink, fence = ready(run_of(place))
    for at in range(5):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
    folder = place.root / "_oncely" / "ledger-p"
    state = sink.ledger.read()
    ahead = folder / f"{(state.version >> 32) + 1 << 32}.json"
    ahead.write_text("{}")
    assert len(list(folder.iterdir())) == 7
    sink.ledger.tidy(fence)
    assert sorted(folder.iterdir()) == [folder / f"{state.version}.json", ahead]
    commit_all(sink, at_t0(5, numbered(5, 6)), fence)
    assert place.ids() == [*range(6)]


# -- what is refused -----------------------------------------------------------------------


def made(place: DeltaPlace, schema: pa.Schema = SCHEMA, **more: Any) -> DeltaTable:
    return DeltaTable.create(place.root, schema, **more)


@pytest.mark.parametrize(
    ("schema", "more", "said"),
    [
        (SCHEMA, {"configuration": {"delta.setTransactionRetentionDuration": "interval 7 days"}},
         "setTransactionRetentionDuration is set"),
        (SCHEMA, {"configuration": {"delta.deletedFileRetentionDuration": "interval 30 minutes"}},
         "deletedFileRetentionDuration"),
        (SCHEMA, {"partition_by": ["name"]}, "partitioned by"),
        (pa.schema([("id", pa.string())]), {}, "column 'id' is string"),
        (pa.schema([pa.field("id", pa.int64(), nullable=False)]), {}, "NOT NULL"),
        (pa.schema([("ID", pa.int64())]), {}, "differs from 'ID'"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_take_the_rows(
    place: DeltaPlace, schema: pa.Schema, more: Any, said: str
) -> None:
    made(place, schema, **more)
    with pytest.raises(TableMismatch, match=said) as caught:
        open_sink(place.sink())
    assert caught.value.way_out
    assert place.table.version() == 0, "nothing was written"


def test_a_constraint_is_refused(place: DeltaPlace) -> None:
    made(place).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(TableMismatch, match="CHECK constraints"):
        open_sink(place.sink())


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        ("icebergCompatV2", "Unsupported table features"),
        ("unheardOf", "Unsupported table features"),
        ("deletionVectors", "deletion vectors is not supported"),
    ],
)
def test_a_table_that_needs_more_than_we_know(place: DeltaPlace, feature: str, said: str) -> None:
    """It ends the run; asked again, it would be the same."""
    made(place)
    log = place.root / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for one in actions:
        if "protocol" in one:
            read = [feature] if feature == "deletionVectors" else []
            one["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7,
                               "readerFeatures": read, "writerFeatures": [feature]}  # fmt: skip
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(TableMismatch, match=said):
        open_sink(place.sink(keys=["id"]))


def test_a_table_that_is_changed_while_a_run_writes(place: DeltaPlace) -> None:
    """A column that is gone would be left out of the rows in silence."""
    sink, fence = ready(run_of(place))
    table = place.table
    table.alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 1 days"})
    with pytest.raises(TableMismatch, match="RetentionDuration"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert place.ids() == []


def test_columns_that_the_table_lacks_are_added(place: DeltaPlace) -> None:
    made(place, pa.schema([("id", pa.int64()), ("more", pa.string())]))
    with pytest.raises(TableMismatch, match=r"sink\.create is false and the table lacks"):
        open_sink(place.sink(create=False))
    sink, fence = ready(run_of(place))
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    assert place.table.to_pyarrow_table().column_names == ["id", "more", "name"]
    assert [row["name"] for row in place.rows()] == ["name 0", "name 1"]


def test_without_a_table_that_may_not_be_created(place: DeltaPlace) -> None:
    with pytest.raises(TableMismatch, match=r"sink\.create is false"):
        open_sink(place.sink(create=False))


def test_without_the_package(place: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_sink(place.sink())
    assert caught.value.way_out == "pip install 'oncely[delta]'"


# -- what delta-rs does, and the ledger relies on ------------------------------------------


def test_a_handle_that_is_not_the_newest_commits_nothing(place: DeltaPlace) -> None:
    """With ``max_commit_retries=0``, whoever has committed since: of this or another pipeline."""
    made(place)

    def commit(table: DeltaTable, app: str, version: int) -> None:
        once = CommitProperties(app_transactions=[Transaction(app, version)], max_commit_retries=0)
        table.create_write_transaction([], "append", table.schema(), commit_properties=once)

    old = place.table
    commit(place.table, "another", 1)
    with pytest.raises(Exception, match="Failed to commit transaction"):
        commit(old, "ours", 1)
    assert place.table.transaction_version("ours") is None


def test_a_ledger_of_a_newer_version_is_refused(place: DeltaPlace) -> None:
    open_sink(place.sink())
    (ledger,) = (place.root / "_oncely").rglob("*.json")
    newer = '{"format":2,"positions":"in a form of its own"}'
    assert '"format":1' in ledger.read_text()
    ledger.write_text(newer)
    with pytest.raises(NewerFormat, match=r"has format 2, .*formats up to 1") as refused:
        open_sink(place.sink())
    assert "upgrade Oncely" in refused.value.way_out
    assert ledger.read_text() == newer
    assert [*(place.root / "_oncely").rglob("*.json")] == [ledger]


@pytest.mark.parametrize("name", ["totals", "started", "format"])
def test_a_ledger_of_an_older_version_is_refused(place: DeltaPlace, name: str) -> None:
    """Without a field that every version since the first release writes."""
    open_sink(place.sink())
    (ledger,) = (place.root / "_oncely").rglob("*.json")
    whole = json.loads(ledger.read_text())
    older = json.dumps({field: one for field, one in whole.items() if field != name})
    ledger.write_text(older)
    store = Store(place.root.as_uri())
    for call in (
        lambda: open_sink(place.sink()),
        lambda: read_document(store, place.name, int(ledger.stem)),
    ):
        with pytest.raises(OlderFormat, match=r"before 0\.1\.0"):
            call()
    assert ledger.read_text() == older
    assert [*(place.root / "_oncely").rglob("*.json")] == [ledger]
