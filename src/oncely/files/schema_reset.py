"""The schema of a scope, learned anew from the rows that its files hold.

A schema only grows, and a record that contradicts it is a dead letter. What it has learned from a
record that is no row, or whose file is gone, a reset forgets: the new schema has the columns that
some row has a value in, with the types of these values. So every file resolves to it. A column
with values stays as it is, for a reader has to read them.

A reset is a takeover, as that of positions is: it takes the next epoch, which fences whatever runs,
and then writes the schema in one transaction by the publisher's id. Killed in between, it has
changed nothing but the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.core.claim import Takeover
from oncely.decode.avro_names import arrow_schema_of, avro_schema_of
from oncely.decode.merging import CannotMerge, merge
from oncely.decode.schema import type_name
from oncely.errors import ConfigError, InvariantViolation, Stopped, WrongInput
from oncely.files.reading import Named, own_rows
from oncely.files.table import Table, destination_of, table_of
from oncely.lake.held import held_schema
from oncely.lake.manifest import Contents
from oncely.lake.records import Scope
from oncely.pipeline import Pipeline


@dataclass(frozen=True)
class SchemaReset:
    """What a reset does, or has done.

    Attributes:
        scope: whose schema.
        files: that the scope has.
        before, after: its columns; none after when it has no files: it begins anew.
        epoch: the epoch that it was written with; None for a dry run.
    """

    scope: Scope
    files: int
    before: pa.Schema
    after: pa.Schema
    epoch: int | None = None

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Columns that change: name, type before, and after; nothing when it is forgotten."""
        now = {field.name: field for field in self.after}
        return [
            (one.name, type_name(one.type), type_name(own.type) if own else "")
            for one in self.before
            for own in [now.get(one.name)]
            if own is None or not one.equals(own, check_metadata=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        names = ("column", "before", "after")
        return {
            "scope": list(self.scope),
            "files": self.files,
            "changes": [dict(zip(names, one, strict=True)) for one in self.changes],
            "executed": self.epoch is not None,
            "epoch": self.epoch,
        }


def reset_schema(pipeline: Pipeline, scope: Sequence[str | None], *, execute: bool) -> SchemaReset:
    """Say what the schema of a scope would become and, with ``execute``, make it that.

    Args:
        pipeline: whose sink is files.
        scope: as ``oncely files schema show`` shows it.
        execute: without it nothing is written.

    Raises:
        WrongInput: there is no such scope; the pipeline has no ledger, or one of another topic or
            cluster.
        Fenced: another run opened at the same moment; nothing has changed.
        DataLost: a file of the scope is not what was published.
        Unavailable: a server does not answer.
    """
    table, wanted = table_of(pipeline), tuple(scope)
    with table.manifest() as manifest:
        planned = _planned(table, manifest.settled(), wanted)
    if not execute:
        return planned
    if pipeline.settings.offsets.store != "ledger":
        raise ConfigError(
            "offsets.store",
            "without a ledger nothing fences a run that still knows the old schema",
            way_out="give the pipeline a new name, root and topics",
        )
    source = pipeline.source
    with closing(destination_of(pipeline).bare_sink) as sink:
        opened = sink.open(
            Takeover(
                source.identity(),
                lambda: source.resolve_start(pipeline.settings.source.start),
                {tp: mark.low for tp, mark in source.watermarks().items()},
            )
        )

        def learned(contents: Contents) -> str | None:
            nonlocal planned
            planned = _planned(table, contents, wanted)
            return avro_schema_of(planned.after) if planned.files else None

        sink.replace_schema(wanted, learned, opened.fence)
    done = planned
    return SchemaReset(done.scope, done.files, done.before, done.after, opened.fence.epoch)


def _planned(table: Table, contents: Contents, scope: Scope) -> SchemaReset:
    known = contents.schemas.get(scope)
    if known is None:
        raise WrongInput(
            f"no schema is published for the scope {list(scope)}",
            way_out="`oncely files schema show` shows all scopes",
        )
    files = [file for file in contents.files.values() if file.scope == scope]
    after = pa.schema([])
    for file in files:
        try:
            after = merge(after, held_schema(own_rows(table.store, Named.of(file))))
        except (CannotMerge, InvariantViolation) as error:
            raise Stopped(
                f"{file.path} does not go together with other files of its scope: {error}",
                way_out="`oncely files verify` tells more",
            ) from None
    before = arrow_schema_of(known.avro)
    ordered = [name for name in before.names if name in after.names]
    rest = [name for name in after.names if name not in ordered]
    after = pa.schema([after.field(name) for name in [*ordered, *rest]])
    return SchemaReset(scope, len(files), before, after)
