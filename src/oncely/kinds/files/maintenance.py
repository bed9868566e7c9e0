"""Maintenance of the files of a pipeline: removal of orphans, and reset of a scope's schema.

Orphans are files that the manifest does not list, or lists no longer. A schema that is reset is
inferred again from the rows in the scope's files.

Why no orphan can be, or become, part of the table; times are the store's clock:

1. The clock is read, then the store is listed, then the manifest is read, settled. A file that was
   published before the listing is in the manifest that is read, because its message was in the
   topic before, and settled waits for the transaction.
2. A file that was listed and is published later was staged less than ``max_staging_age`` before its
   transaction began: a publisher checks the age after the begin. The transaction ends within its
   timeout, and the coordinator checks timeouts every ten seconds. So a file that is older than
   both, and some slack, at the reading of the clock will not be published. Both limits are those of
   the process that staged the file, which may no longer be in the pipeline file: the largest of all
   leases (:mod:`oncely.kinds.files.sink`) and the file's own are used. A process whose lease is
   not in the listing began its batch after the clock was read.
3. Files that a compaction has replaced may still be used by readers that have read the manifest
   before. They are kept for ``max_staging_age``, too, from then on. The broker's timestamp is that
   of the message; readers see the old file until the transaction has ended, up to its timeout
   later.
4. A manifest that has lost entries would turn files of the table into orphans. So its id must be
   the id in the ledger, before and after the reading: a topic that is recreated meanwhile has
   another id. And its log must begin at 0: that of a topic that is only ever compacted does.
5. The root must belong to this manifest (:mod:`oncely.kinds.files.topics`), and a file's name must
   be one of Oncely's: other files are not touched, and neither are files below a folder that is the
   root of another table.

A schema only grows, and a record that contradicts it is a dead letter. A reset drops the effects of
records that are not rows, or whose files are removed: the new schema has the columns in which some
row has a value, with the types of these values. So every file resolves to it. A column with values
is kept, because readers have to read them.

Like a reset of positions, a reset is a takeover: it takes the next epoch, which fences a running
pipeline, and then writes the schema in one transaction with the publisher's transactional id.
Killed in between, it has changed only the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.claim import Takeover
from oncely.decode.avro_schema import arrow_schema_of, avro_schema_of
from oncely.decode.merging import CannotMerge, merge
from oncely.decode.schema import type_name
from oncely.errors import ConfigError, InvariantViolation, Stopped, WrongInput
from oncely.kinds.conform import held_schema
from oncely.kinds.data_file import Scope
from oncely.kinds.files import topics as owner
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.sink import LeaseLimits, limits_of, valid_leases
from oncely.kinds.files.table import Named, Table, destination_of, own_rows, table_of
from oncely.kinds.kind import Parts
from oncely.kinds.partitions import is_file
from oncely.stores.objects.store import StoredFile

SLACK = timedelta(seconds=60)
"""Clocks of broker and store may differ, a store may return whole seconds, and the coordinator
ends a transaction up to ten seconds late
(transaction.abort.timed.out.transaction.cleanup.interval.ms)."""

_PROBE = re.compile(r"\.oncely-probe-[0-9a-f]+")
"""See :mod:`oncely.stores.objects.store`."""


@dataclass(frozen=True)
class Vacuumed:
    """The result of a vacuum, or of a dry run.

    Attributes:
        dry_run: nothing was removed.
        orphans: unlisted files that cannot be published any more.
        young: unlisted files that may still be published.
        for_readers: files that were removed so recently that readers may use them.
        foreign: files without a name of Oncely, or of tables below this one; not touched.
        uploads: the number of incomplete multipart uploads; None on S3, where they are not listed.
        live: the number of files of the table.
    """

    dry_run: bool
    orphans: tuple[StoredFile, ...]
    young: int
    for_readers: int
    foreign: int
    uploads: int | None
    live: int

    @property
    def bytes(self) -> int:
        """The size of the orphans."""
        return sum(one.bytes for one in self.orphans)

    def as_json(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        return {
            "dry_run": self.dry_run,
            "orphans": [
                {"path": o.path, "bytes": o.bytes, "modified": o.modified.isoformat()}
                for o in self.orphans
            ],
            "removed": 0 if self.dry_run else len(self.orphans),
            "bytes": self.bytes,
            "young": self.young,
            "for_readers": self.for_readers,
            "foreign": self.foreign,
            "uploads": self.uploads,
            "live": self.live,
        }


def vacuum(table: Table, *, dry_run: bool = False) -> Vacuumed:
    """Remove orphans.

    Incomplete multipart uploads of S3 are not among them: pyarrow has no call that lists them.

    Args:
        table: the table.
        dry_run: only return the orphans.

    Raises:
        ConfigError: never written to, or the root belongs to another pipeline.
        SourceMismatch: the manifest topic is another topic of the same name.
        DataLost: the manifest does not begin at 0.
        Unavailable: no answer, or a transaction stayed open.
    """
    registered = registered_id(table)
    with table.manifest() as manifest:
        manifest.require_whole(registered)
        owner.require(table.store, registered)
        now = table.store.now()
        stored = list(table.store.list())
        contents = manifest.settled()
        manifest.require_whole(registered)
    held = valid_leases(stored, now - SLACK)
    given = LeaseLimits(table.max_staging_age, table.pipeline_topics.transaction_timeout)
    limits = [given, *held.values()]
    left = now - timedelta(seconds=max(one.max_staging_age for one in limits)) - SLACK
    done_for = left - timedelta(seconds=max(one.transaction_timeout for one in limits))
    unleased = [one for one in stored if one.path not in held]
    found = _sorted(unleased, contents, done_for)
    if not dry_run:
        table.store.delete(one.path for one in found["orphans"])
    return Vacuumed(
        dry_run,
        tuple(found["orphans"]),
        len(found["young"]),
        len(found["for_readers"]),
        len(found["foreign"]),
        None if table.store.url.startswith("s3:") else 0,
        len(contents.files),
    )


def registered_id(table: Table) -> str:
    """The id of the manifest topic when the pipeline registered.

    Raises:
        ConfigError: the ledger does not contain it.
    """
    known = table.ledger().pipeline
    topic_id = known.outputs.get(table.manifest_topic) if known is not None else None
    if topic_id is None:
        raise ConfigError(
            "sink.ledger_topic",
            f"{table.pipeline_topics.ledger_topic!r} does not contain the manifest of pipeline"
            f" {table.pipeline_topics.pipeline!r} has written to",
            way_out="run the pipeline first, or correct its name",
        )
    return topic_id


def _sorted(
    stored: Iterable[StoredFile], contents: Contents, done_for: datetime
) -> dict[str, list[StoredFile]]:
    """The unlisted files, by what will be done with them."""
    found: dict[str, list[StoredFile]] = {
        name: [] for name in ("orphans", "young", "for_readers", "foreign")
    }
    listed = sorted(stored, key=lambda one: one.path)
    others = _roots_below(listed)
    for one in listed:
        if one.path in contents.files or one.path in (owner.PATH, owner.NOTICE):
            continue
        removed = contents.removed.get(one.path)
        ours = is_file(one.path) or _PROBE.fullmatch(one.path) or limits_of(one.path)
        if not ours or one.path.startswith(others):
            kind = "foreign"
        elif removed is not None and removed > done_for.timestamp() * 1000:
            kind = "for_readers"
        elif one.modified > done_for:
            kind = "young"
        else:
            kind = "orphans"
        found[kind].append(one)
    return found


def _roots_below(stored: Iterable[StoredFile]) -> tuple[str, ...]:
    """The folders below the root that are roots of other tables, with a slash at the end."""
    mark = "/" + owner.PATH
    return tuple(o.path.removesuffix(owner.PATH) for o in stored if o.path.endswith(mark))


# -- reset of a schema ----------------------------------------------------------------------


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
