"""Removal of orphans: files that the manifest does not list, or lists no longer.

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
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from oncely.errors import ConfigError
from oncely.kinds.files import topics as owner
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.sink import LeaseLimits, limits_of, valid_leases
from oncely.kinds.files.table import Table
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
