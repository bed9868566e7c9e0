"""Two files that mark a root: its owner, and a notice for people who list the folder.

The owner is a small file that contains the id of the manifest topic.

Files that the manifest does not list are orphans, and orphans are deleted. Two tables below one
root would each treat the other's files as orphans. So a root belongs to one manifest topic: a run
claims it when it opens, and ``vacuum`` checks it.

pyarrow offers no compare-and-set of object stores. Two first runs that claim a root at the same
moment may both write; the second read below lets the loser detect it, unless its read comes before
the other's write. Then the loser detects it at its next start, and its ``vacuum`` refuses: files of
both are kept until the user moves one of the tables.

The notice is a text in the root. It is written when the root is claimed, and again by the next run
if it is missing.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from oncely.errors import ConfigError, InvariantViolation
from oncely.stores.objects.store import NoSuchFile, Store

PATH = "_oncely/owner.json"
"""The path below the root. An underscore hides it from tools that read directories."""

NOTICE = "_READ_THE_MANIFEST.txt"
"""The path of the notice below the root; the underscore has the same purpose."""

_NOTICE = """\
This folder contains the files of a table, and files that are not part of it: files of attempts that
were never committed, and files that a compaction or a repair has replaced. A reader that lists the
folder reads rows twice, and rows that were never committed. Partition folders do not change that.

The list of the table's files is the Kafka topic {manifest_topic}, the manifest
of pipeline {pipeline}. With the pipeline's file:

  oncely files paths FILE     the files, as JSON lines for DuckDB, polars, Spark and others
  oncely files read FILE      the rows, compared with their checksums
  oncely files verify FILE    compares each file with the manifest
  oncely files vacuum FILE    removes files that are not part of the table

Delete nothing here by hand: `oncely files vacuum` knows which files a run may still publish.
"""


class Owner(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        pipeline: its name, for people.
        manifest_topic: its name, for people.
        topic_id: its id, which distinguishes it from topics of the same name, also on other
            clusters.
    """

    pipeline: str
    manifest_topic: str
    topic_id: str


def claim(store: Store, owner: Owner) -> None:
    """Claim the root for this manifest, or check that it is its owner; write a missing notice.

    Raises:
        ConfigError: it belongs to another manifest.
    """
    if owner_of(store) is None:
        store.write(PATH, msgspec.json.encode(owner))
        store.durable()
    require(store, owner.topic_id)
    if not store.exists(NOTICE):
        text = _NOTICE.format(manifest_topic=owner.manifest_topic, pipeline=owner.pipeline)
        # Another run of the pipeline may write it at the same moment.
        with suppress(InvariantViolation):
            store.write(NOTICE, text.encode())


def require(store: Store, topic_id: str) -> None:
    """Refuse a root that does not belong to this manifest.

    Raises:
        ConfigError: it belongs to another manifest, or has no known owner.
    """
    found = owner_of(store)
    if found is None:
        raise ConfigError(
            "sink.url",
            f"{store!r} has no {PATH}: it is not known whose files are below it",
            way_out="run the pipeline once: it claims the root when it starts",
        )
    if found.topic_id != topic_id:
        raise ConfigError(
            "sink.url",
            f"{store!r} belongs to pipeline {found.pipeline!r} with manifest topic"
            f" {found.manifest_topic!r} of id {found.topic_id}, and this one has id {topic_id}:"
            " each would treat the other's files as orphans",
            way_out="give every pipeline a root of its own",
        )


def owner_of(store: Store) -> Owner | None:
    """The owner of the root, or None.

    Raises:
        ConfigError: the file exists and is invalid.
    """
    try:
        data = store.read(PATH)
    except NoSuchFile:
        return None
    try:
        return msgspec.json.decode(data, type=Owner)
    except msgspec.DecodeError as error:
        raise ConfigError(
            "sink.url", f"{store!r}: {PATH} is not ours: {error}", way_out="name another root"
        ) from None
