"""Reset of a scope's schema, inferred again from the rows in its files.

A schema only grows, and a record that contradicts it is a dead letter. A reset drops the effects of
records that are not rows, or whose files are removed: the new schema has the columns in which some
row has a value, with the types of these values. So every file resolves to it. A column with values
is kept, because readers have to read them.

Like a reset of positions, a reset is a takeover: it takes the next epoch, which fences a running
pipeline, and then writes the schema in one transaction with the publisher's transactional id.
Killed in between, it has changed only the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.claim import Takeover
from oncely.decode.avro_names import arrow_schema_of, avro_schema_of
from oncely.decode.merging import CannotMerge, merge
from oncely.decode.schema import type_name
from oncely.errors import ConfigError, InvariantViolation, Stopped, WrongInput
from oncely.kinds.conform import held_schema
from oncely.kinds.data_file import Scope
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.table import Named, Table, destination_of, own_rows, table_of
from oncely.kinds.kind import Parts


@dataclass(frozen=True)
class SchemaReset:
    """The result of a reset, or of a dry run.

    Attributes:
        scope: the scope.
        files: the number of files of the scope.
        before, after: its columns; ``after`` is None if it has no files: the schema begins empty.
        epoch: the epoch of the reset; None for a dry run.
    """

    scope: Scope
    files: int
    before: pa.Schema
    after: pa.Schema
    epoch: int | None = None

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Columns that change: name, type before, and after; empty if the schema is dropped."""
        now = {field.name: field for field in self.after}
        return [
            (one.name, type_name(one.type), type_name(own.type) if own else "")
            for one in self.before
            for own in [now.get(one.name)]
            if own is None or not one.equals(own, check_metadata=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        names = ("column", "before", "after")
        return {
            "scope": list(self.scope),
            "files": self.files,
            "changes": [dict(zip(names, one, strict=True)) for one in self.changes],
            "executed": self.epoch is not None,
            "epoch": self.epoch,
        }


def reset_schema(parts: Parts, scope: Sequence[str | None], *, execute: bool) -> SchemaReset:
    """Compute the new schema of a scope and, with ``execute``, write it.

    Args:
        parts: those of a pipeline with a files sink.
        scope: the scope, as shown by ``oncely files schema show``.
        execute: write; otherwise a dry run.

    Raises:
        WrongInput: there is no such scope; the pipeline has no ledger, or a ledger of another topic
            or cluster.
        Fenced: another run opened at the same moment; nothing has changed.
        DataLost: a file of the scope differs from the published one.
        Unavailable: a server does not answer.
    """
    table, wanted = table_of(parts), tuple(scope)
    with table.manifest() as manifest:
        planned = _planned(table, manifest.settled(), wanted)
    if not execute:
        return planned
    if parts.settings.offsets.store != "ledger":
        raise ConfigError(
            "offsets.store",
            "without a ledger a run with the old schema is not fenced",
            way_out="give the pipeline a new name, root and topics",
        )
    source = parts.source
    with closing(destination_of(parts).sink()) as sink:
        opened = sink.open(
            Takeover(
                source.identity(),
                lambda: source.resolve_start(parts.settings.source.start),
                {tp: mark.low for tp, mark in source.watermarks().items()},
            )
        )

        def learned(contents: Contents) -> str | None:
            nonlocal planned
            planned = _planned(table, contents, wanted)
            return avro_schema_of(planned.after) if planned.files else None

        for attempt in attempts(Backoff()):
            with attempt:
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
                way_out="`oncely files verify` shows the details",
            ) from None
    before = arrow_schema_of(known.avro)
    ordered = [name for name in before.names if name in after.names]
    rest = [name for name in after.names if name not in ordered]
    after = pa.schema([after.field(name) for name in [*ordered, *rest]])
    return SchemaReset(scope, len(files), before, after)
