"""Whose root it is: one small file that names the manifest topic by its id.

What the manifest does not name is an orphan, and orphans are deleted. Two tables below one root
would each take the other's files for orphans. So a root belongs to one manifest topic: a run claims
it when it opens, and ``vacuum`` asks.

Object stores have no compare-and-set that pyarrow knows. Two first runs that claim a root at the
same moment may both write; the second reading below lets the loser see it, unless its reading comes
before the other's writing. The loser then finds out at its next start, and its ``vacuum`` refuses:
files of both are kept until somebody moves one of them.
"""

from __future__ import annotations

import msgspec

from oncely.clients.files.store import NoSuchFile, Store
from oncely.errors import ConfigError

PATH = "_oncely/owner.json"
"""Below the root. An underscore hides it from tools that read directories."""


class Owner(msgspec.Struct, frozen=True):
    """What the file says.

    Attributes:
        pipeline: for people.
        manifest_topic: its name, for people.
        topic_id: its id, which tells it from others by the same name and from other clusters'.
    """

    pipeline: str
    manifest_topic: str
    topic_id: str


def claim(store: Store, owner: Owner) -> None:
    """Make the root this manifest's, or see that it is.

    Raises:
        ConfigError: it belongs to another one.
    """
    if owner_of(store) is None:
        store.write(PATH, msgspec.json.encode(owner))
        store.durable()
    require(store, owner.topic_id)


def require(store: Store, topic_id: str) -> None:
    """Refuse a root that is not this manifest's.

    Raises:
        ConfigError: it belongs to another one, or to nobody that is known.
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
            " each would take the other's files for orphans",
            way_out="give every pipeline a root of its own",
        )


def owner_of(store: Store) -> Owner | None:
    """Whose root it is; None: nobody's yet.

    Raises:
        ConfigError: the file is there and unreadable.
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
