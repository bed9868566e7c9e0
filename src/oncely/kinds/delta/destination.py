"""A Delta table as a pipeline's destination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial

import pyarrow as pa

from oncely.core.batch import Reject
from oncely.core.change import RewriteKind
from oncely.core.digest import kind_of
from oncely.core.ranges import from_tree
from oncely.decode.avro_schema import storable
from oncely.decode.schema import refuse_other_capitals
from oncely.kinds.delta.change import DeltaReplay, DeltaRewrites, discard_letters
from oncely.kinds.delta.form import DeltaFormat, form_of
from oncely.kinds.delta.settings import DeltaSinkSettings
from oncely.kinds.delta.sink import DeltaSink
from oncely.kinds.destination import (
    NO_COLUMNS,
    PROBED,
    Discard,
    Inspection,
    LedgerState,
    SinkFacts,
    SinkPlan,
)
from oncely.kinds.kind import Parts
from oncely.kinds.rows import Form
from oncely.kinds.tables import TableDestination, keeps_source
from oncely.stores.delta import connect
from oncely.stores.objects.store import connect as connect_files


class DeltaDestination(TableDestination):
    """A Delta table and its ledger."""

    given: DeltaSinkSettings

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._store = replace(self.given.store, connect=parts.files_connect or connect_files)
        self._connect = parts.delta_connect or connect

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows, and of their origin if it is kept."""
        found = super().row_schema(schema)
        refuse_other_capitals(found, "a Delta table")
        return found

    @cached_property
    def columns_there(self) -> frozenset[str]:
        """The columns of the table, read once; none if it does not exist."""
        table = self.sink().tables.load()
        fields = () if table is None else table.schema().fields
        return frozenset(one.name for one in fields)

    def sink(self, schema: pa.Schema = NO_COLUMNS) -> DeltaSink:
        """The sink for rows of these columns."""
        given = self.given
        form = DeltaFormat(
            storable(schema), given.partition_by, given.keys, given.version,
            given.target_file_size, keeps_source(schema),
        )  # fmt: skip
        age = given.max_staging_age
        return DeltaSink(self.settings.name, self._store, form, given.create, age, self._connect)

    def form(self, schema: pa.Schema) -> Form:
        """Rows with the types of the table."""
        return form_of(self.sink(schema).form)

    def look(self) -> LedgerState:
        """Read the ledger; empty for a table that was never created."""
        ledger = self.sink().ledger
        state = ledger.read()
        now, refused = state.document, ledger.taken_back(state)
        return LedgerState(
            now.epoch,
            now.cluster_id or None,
            from_tree(now.positions),
            now.topic_ids,
            sum(count for _, count in now.rejects),
            from_tree(now.leader_epochs),
            refused="" if refused is None else refused.message,
        )

    def wrote(self) -> str:
        """The table, if it has rows."""
        table = self.sink().tables.load()
        there = table is not None and table.file_uris()
        return f"the table at {self.given.url} has rows" if there else ""

    def check(self, schema: pa.Schema) -> None:
        """Refuse a root, columns or a table that do not fit."""
        self.sink(schema).check()

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        ledger = self.sink().ledger
        named = ledger.read().document.rejects
        found = (one for path, _ in named for one in ledger.letters(path))
        letters = [one for one in found if one.pending is not discarded]
        letters.sort(key=lambda one: (one.partition, one.offset))
        return letters[:limit], len(letters)

    def discarding(self) -> Discard:
        """Begin a discard in the ledger's files."""
        return partial(discard_letters, self.sink())

    def replaying(self, schema: pa.Schema) -> nullcontext[DeltaReplay]:
        """Begin a replay into the table."""
        sink = self.sink(schema)
        sink.prepare()
        return nullcontext(DeltaReplay(sink))

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> Mapping[str, str]:
        """Refuse rows that do not contain their record's offset, an upsert without a version, and a
        table whose files can't be replaced."""
        del kind
        self.check_origin(tells=keeps_source(schema))
        DeltaRewrites(self.sink()).check()
        return {}

    def rewriting(self, schema: pa.Schema, kind: RewriteKind) -> nullcontext[DeltaRewrites]:
        """Begin a rewrite."""
        del kind
        return nullcontext(DeltaRewrites(self.sink(schema)))

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect root, columns and table."""
        facts = None
        with inspection.about("sink.url"):
            ledger = self.sink().ledger
            if refused := ledger.taken_back(ledger.read()):
                raise refused
        with inspection.about("sink.url"):
            sink = self.sink(schema)
            table = sink.tables.load()
            columns = tuple((one.name, str(one.type), "parquet") for one in sink.form.schema)
            facts = SinkFacts("table", self.given.url, self.given.url, table is not None, columns)
            if schema is not NO_COLUMNS:
                sink.check()
                inspection.notes.append(PROBED)
                inspection.notes += self._audit_notes(sink.form)
        return SinkPlan(facts)

    def _audit_notes(self, form: DeltaFormat) -> Iterator[str]:
        """The limits of an audit of the table."""
        kinds = {one.name: kind_of(one.type) for one in form.schema}
        why = "an audit does not compare lists, structs and maps"
        return self.audit_notes(self.given.url, kinds, why, kept=form.keep_source)
