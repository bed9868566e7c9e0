"""Orphans removed: files that were written and that no manifest names, or names no longer.

Why none of them can be, or become, part of the table; times are the store's clock:

1. The clock is read, then the store is listed, then the manifest is read, settled. A file that was
   published before the listing is in the manifest that is read, for its message was in the topic
   before, and settled waits for the transaction.
2. A file that was listed and is published later was staged less than ``max_staging_age`` before its
   transaction began: a publisher looks at the age after it has begun. The transaction ends within
   its timeout, and the coordinator looks for those that have not every ten seconds. So a file that
   is older than both, and some slack, at the reading of the clock will be published by nobody.
   Both limits are those of the process that staged the file, which the pipeline file may not hold
   any more: the largest of all leases (:mod:`oncely.lake.leases`) and the file's own count.
   A process whose lease is not in the listing began its batch after the clock was read.
3. Files that a compaction has replaced are what readers may still be reading, who have looked at
   the manifest before. They are kept for ``max_staging_age``, the same, from then on. The broker
   tells when it got the message; readers find the old file until the transaction has ended, which
   is up to its timeout later.
4. A manifest that has lost entries would make orphans of files that are part of the table. So its
   id must be the one that the ledger has noted, before and after it was read: a topic that is made
   again meanwhile has another one. And its log must begin at 0, where it was created: what is only
   ever compacted does.
5. The root must be this manifest's (:mod:`oncely.lake.root_marker`), and a file's name one that
   Oncely gives: what else lies there is not touched, and neither is what lies below a folder that
   is the root of another table. The same holds for multipart uploads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from oncely.clients.files.store import Stored
from oncely.errors import ConfigError
from oncely.files.table import Table
from oncely.lake import root_marker as owner
from oncely.lake.leases import Limits, limits_of, valid_leases
from oncely.lake.manifest import Contents
from oncely.lake.names import is_file

SLACK = timedelta(seconds=60)
"""Clocks of broker and store may differ, a store may tell whole seconds, and the coordinator ends a
transaction up to ten seconds late (transaction.abort.timed.out.transaction.cleanup.interval.ms)."""

_PROBE = re.compile(r"\.oncely-probe-[0-9a-f]+")
"""See :mod:`oncely.clients.files.store`."""


@dataclass(frozen=True)
class Vacuumed:
    """What a vacuum has done, or would do.

    Attributes:
        dry_run: nothing was removed.
        orphans: files that nobody names and nobody can publish any more.
        young: unnamed files that may still be published.
        for_readers: files that were taken out so recently that readers may be at them.
        foreign: files that Oncely has not named, or of tables below this one; not touched.
        uploads: multipart uploads that were given up.
        live: files of the table.
    """

    dry_run: bool
    orphans: tuple[Stored, ...]
    young: int
    for_readers: int
    foreign: int
    uploads: int
    live: int

    @property
    def bytes(self) -> int:
        """Of the orphans."""
        return sum(one.bytes for one in self.orphans)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
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
    """Remove orphans, and multipart uploads that were left over.

    Args:
        table: whose.
        dry_run: only say what would be removed.

    Raises:
        ConfigError: never written to, or the root is another pipeline's.
        SourceMismatch: the manifest topic is another one by the same name.
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
    given = Limits(table.max_staging_age, table.place.transaction_timeout)
    limits = [given, *held.values()]
    left = now - timedelta(seconds=max(one.max_staging_age for one in limits)) - SLACK
    done_for = left - timedelta(seconds=max(one.transaction_timeout for one in limits))
    unleased = [one for one in stored if one.path not in held]
    found = _sorted(unleased, contents, done_for)
    if not dry_run:
        table.store.delete(one.path for one in found["orphans"])
    others = _roots_below(stored)
    uploads = table.store.abort_uploads(
        done_for, lambda path: is_file(path) and not path.startswith(others), dry_run=dry_run
    )
    return Vacuumed(
        dry_run,
        tuple(found["orphans"]),
        len(found["young"]),
        len(found["for_readers"]),
        len(found["foreign"]),
        uploads,
        len(contents.files),
    )


def registered_id(table: Table) -> str:
    """The id that the manifest topic had when the pipeline registered.

    Raises:
        ConfigError: the ledger does not know it.
    """
    known = table.ledger().pipeline
    topic_id = known.outputs.get(table.manifest_topic) if known is not None else None
    if topic_id is None:
        raise ConfigError(
            "sink.ledger_topic",
            f"{table.place.ledger_topic!r} does not know which manifest pipeline"
            f" {table.place.pipeline!r} has written to",
            way_out="run the pipeline first, or mend its name",
        )
    return topic_id


def _sorted(
    stored: Iterable[Stored], contents: Contents, done_for: datetime
) -> dict[str, list[Stored]]:
    """The files that no manifest names, by what is to become of them."""
    found: dict[str, list[Stored]] = {
        name: [] for name in ("orphans", "young", "for_readers", "foreign")
    }
    listed = sorted(stored, key=lambda one: one.path)
    others = _roots_below(listed)
    for one in listed:
        named = one.path in contents.files or one.path in contents.others
        if named or one.path == owner.PATH:
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


def _roots_below(stored: Iterable[Stored]) -> tuple[str, ...]:
    """The folders below the root that are roots of other tables, with a slash at the end."""
    mark = "/" + owner.PATH
    return tuple(o.path.removesuffix(owner.PATH) for o in stored if o.path.endswith(mark))
