"""The Delta sink: tasks write Parquet below the table's root; one table commit adds it.

Files, dead letters, positions and epoch take effect together, in one version of the table.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.core.batch import Batch, Staged, StagedRowsGone
from oncely.core.claim import Claim, Fence, Opened, PositionMoved, Takeover
from oncely.errors import ConfigError, TableMismatch, check
from oncely.kinds.data_file import WrittenFile, read_receipt
from oncely.kinds.delta.form import CLEARED, DeltaFormat, DeltaTask, newest
from oncely.kinds.delta.ledger import FOLDER, DeltaLedger, State
from oncely.kinds.partitions import check_types, is_cut, parse_partition_by
from oncely.kinds.rows import DELETED
from oncely.kinds.staged_files import clock, refuse_old
from oncely.stores.delta import DataFile, DeltaConnect, DeltaTables, Merge, connect
from oncely.stores.objects.root import require_conditional_writes
from oncely.stores.objects.store import NoSuchFile, Store


@dataclass
class DeltaSink:
    """A Delta table and the ledger in it.

    Attributes:
        pipeline: the ledger's key.
        store: the store of the table's root.
        form: the format of the rows.
        create: create a missing table and missing columns.
        max_staging_age: seconds that a file may wait for its commit.
        connect: opens the table; tests inject faults here.
        run: a unique name of this run, which identifies it in the ledger.
    """

    pipeline: str
    store: Store
    form: DeltaFormat
    create: bool = True
    max_staging_age: float = 3600.0
    connect: DeltaConnect = connect
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _began: float = field(default_factory=clock, init=False, repr=False, compare=False)

    @property
    def tables(self) -> DeltaTables:
        """The table's client."""
        return self.connect(self.store.url, self.store.s3)

    @property
    def ledger(self) -> DeltaLedger:
        """Epochs, positions and dead letters, in the table."""
        store, log = self._below(FOLDER), self._below("_delta_log")
        return DeltaLedger(self.pipeline, self.tables, store, log, self.run)

    @property
    def needs(self) -> frozenset[str]:
        """Nothing in addition to the decoder's columns."""
        return frozenset()

    # -- the driver: before and between batches --------------------------------------------

    def check(self) -> None:
        """Check the present root, columns and table.

        Raises:
            ConfigError, TableMismatch: the error names the problem.
        """
        check_types(self.form.schema, parse_partition_by(self.form.partition_by))
        for name in self.form.partition_by:
            if is_cut(self.form.partition_by, name):
                raise ConfigError(
                    "sink.partition_by",
                    f"{name!r} is too long for the names of directories",
                    way_out="rename the column in the transform",
                )
        for name in (*self.form.keys, *filter(None, [self.form.version])):
            if name not in self.form.schema.names:
                raise TableMismatch(f"sink.keys or sink.version: the rows have no column {name!r}")
        self.store.check()
        require_conditional_writes(self.store.url, self.store.s3)
        table = self.tables.load()
        if table is None and not self.create:
            raise TableMismatch("sink.create is false and there is no Delta table at sink.url",
                                way_out="create it")  # fmt: skip
        missing = None if table is None else self._missing(table)
        if missing and not self.create:
            raise TableMismatch(f"sink.create is false and the table lacks {missing.names}",
                                way_out="add them: ALTER TABLE … ADD COLUMNS")  # fmt: skip

    def prepare(self) -> None:
        """Create the table, or its missing columns, if permitted."""
        self.check()
        table = self.tables.load()
        if table is None:
            self.tables.create(self.form.schema, self.form.partition_by)
        while table is not None and (missing := self._missing(table)):
            try:
                self.tables.add_columns(table, missing)
            except PositionMoved:
                table = self.tables.load()
                continue
            return

    def open(self, takeover: Takeover) -> Opened:
        """Prepare the table, and take over its ledger; a reset does not change the table."""
        if takeover.reset is None or (len(self.form.schema) and self.tables.load() is None):
            self.prepare()
        return self.ledger.open(takeover)

    def bind(self) -> DeltaSink:
        """Refuse a table with missing columns."""
        self._require(self.tables.load())
        return self

    def close(self) -> None:
        """Nothing is open between calls."""

    def begin_batch(self) -> None:
        """Note the time: no file of the batch is older."""
        self._began = clock()

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> None:
        """Remove files that were staged for merges; other orphans are removed by the table's
        VACUUM."""
        del fence, keep_batches_from
        if self.form.keys:
            self._staged.delete([f.path for f in self._staged.list() if not f.path.startswith(".")])

    # -- tasks -----------------------------------------------------------------------------

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> DeltaTask:
        """Begin a task's files."""
        form = self.form.staged
        return DeltaTask(self.form, self._staged, form, {(): form.schema}, fence, batch_id, attempt)

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Write the rows of a Spark transform; in an executor."""
        return self.staging(fence, batch_id, attempt).of_transform(rows)

    def agree(self, staged: Staged) -> bool:
        """True: columns are given, so no task contradicts another."""
        del staged
        return True

    # -- the driver: a batch ---------------------------------------------------------------

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Add files and dead letters to the table, and move every position."""
        del fence
        load = self.load(batch.staged)
        state, metadata = self.ledger.read(), {"kind": "rows"}
        document = state.document
        if claim is not None:
            document, metadata = self.ledger.claimed(document, claim, batch.history)
        rejects = [*document.rejects, *self.ledger.keep(state, batch.rejects)]
        document = msgspec.structs.replace(document, rejects=rejects)
        self.commit(state, document, metadata, load)

    def load(self, staged: Iterable[Staged]) -> dict[str, Any]:
        """The data that a commit adds to the table.

        Raises:
            StagedRowsGone: files of a merge are missing.
        """
        staged = list(staged)
        files = [f for one in staged if one.name for f in read_receipt(one.name).files]
        rows, load = 0, dict[str, Any]()
        if not self.form.keys:
            rows, load["files"] = sum(one.rows for one in files), [_data(one) for one in files]
        elif files:
            merged = pa.concat_tables(self._read(one.path) for one in files)
            rows = merged.num_rows - merged[DELETED].to_numpy().sum()
            one = newest(merged, self.form.keys, self.form.version)
            load["merge"] = Merge(one, self.form.keys, self.form.version, DELETED, CLEARED)
        wanted = sum(one.rows for one in staged)
        check(rows == wanted, f"files of {rows} rows are named, {wanted} were staged")
        return load

    def commit(self, state: State, document: Any, metadata: dict[str, Any], load: Any) -> None:
        """Commit, after a check that the table still accepts the rows.

        Raises:
            StagedRowsGone: files are so old that a VACUUM may have removed them.
        """
        self._require(state.table)
        refuse_old(self._began, self.max_staging_age)
        self.ledger.commit(state, document, metadata, **load)

    # -- parts -----------------------------------------------------------------------------

    def _below(self, folder: str) -> Store:
        return Store(f"{self.store.url}/{folder}", self.store.s3, self.store.connect)

    @property
    def _staged(self) -> Store:
        """The store of tasks: files to be merged are outside of the table."""
        return self._below(f"{FOLDER}/staged-{self.pipeline}") if self.form.keys else self.store

    def _read(self, path: str) -> pa.Table:
        try:
            rows = pq.read_table(pa.BufferReader(self._staged.read(path)))
        except NoSuchFile as error:
            raise StagedRowsGone(f"{error.message}; the batch is repeated") from None
        return rows.replace_schema_metadata(None)

    def _require(self, table: Any) -> None:
        """Refuse a table that does not accept the rows."""
        if table is None:
            raise TableMismatch(
                "there is no Delta table", key="sink.url", way_out="start the run again"
            )
        if missing := self._missing(table):
            raise TableMismatch(f"the table lacks the columns {missing.names}",
                                way_out="start the run again, which adds them")  # fmt: skip

    def _missing(self, table: Any) -> pa.Schema:
        return missing_columns(table, self.form, self.max_staging_age)


def _data(one: WrittenFile) -> DataFile:
    return DataFile(one.path, one.bytes, one.rows, one.partition)


# -- checks of the table -------------------------------------------------------------------


_EXPIRY = "delta.setTransactionRetentionDuration"
_RETENTION = "delta.deletedFileRetentionDuration"
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_SPECIAL = ("delta.generationExpression", "delta.identity.", "delta.invariants")


def missing_columns(table: Any, form: DeltaFormat, max_staging_age: float) -> pa.Schema:
    """Columns of the rows that the table lacks.

    Raises:
        TableMismatch: it does not accept the rows, or would not keep committed data.
    """
    found = table.metadata()
    types = {one.name: one.type for one in pa.schema(table.schema().to_arrow())}
    problems = [
        *_settings(found.configuration, form, max_staging_age),
        *_columns(table, form, types),
    ]
    if form.keys and "deletionVectors" in (table.protocol().writer_features or ()):
        problems.append("an upsert into a table with deletion vectors is not supported")
    if tuple(found.partition_columns) != form.partition_by:
        wanted = list(form.partition_by)
        problems.append(f"it is partitioned by {found.partition_columns}, not by {wanted}")
    if problems:
        text = f"the Delta table does not accept the rows: {'; '.join(problems)}"
        raise TableMismatch(text, way_out="change the table or the rows; or another sink.url")
    return pa.schema([one for one in form.schema if one.name not in types])


def _settings(given: Mapping[str, str], form: DeltaFormat, age: float) -> Iterator[str]:
    if _EXPIRY in given:
        yield f"{_EXPIRY} is set: the pipeline's positions would expire"
    kept = re.search(r"(\d+) *(second|minute|hour|day|week)", given.get(_RETENTION, "1 week"))
    if kept is None or int(kept[1]) * _SECONDS[kept[2]] < 2 * age:
        yield f"{_RETENTION} is {given[_RETENTION]}: VACUUM could remove staged files"
    if given.get("delta.columnMapping.mode", "none") != "none":
        yield "column mapping is not supported"
    if any(name.startswith("delta.constraints.") for name in given):
        yield "CHECK constraints are not supported"
    if form.keys and given.get("delta.appendOnly") == "true":
        yield "delta.appendOnly is set, and an upsert replaces rows"


def _columns(table: Any, form: DeltaFormat, types: Mapping[str, pa.DataType]) -> Iterator[str]:
    for one in table.schema().fields:
        special = [key for key in one.metadata if key.startswith(_SPECIAL)]
        if special or not one.nullable:
            yield f"column {one.name!r} is {special[0] if special else 'NOT NULL'}"
    spelled = {name.lower(): name for name in types}
    for one in form.schema:
        there = spelled.get(one.name.lower(), one.name)
        if there != one.name:
            yield f"column {one.name!r} differs from {there!r} in capitals only"
        elif types.get(one.name, one.type) != one.type:
            yield f"column {one.name!r} is {types[one.name]}, and the rows have {one.type}"
