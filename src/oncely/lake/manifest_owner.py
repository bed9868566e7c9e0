"""The pipeline and the root to which a manifest topic belongs.

The root names its manifest (:mod:`oncely.lake.root_marker`); this is the inverse. Two roots with
one manifest break both tables: each reads the other's entries, whose files it does not have.

A run that opens a manifest topic without an owner writes its record there. Each pipeline has a key
of its own, and the first record in the log is valid: two runs that write at the same moment both
see the same first record, and the other run removes its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oncely.clients.files.root import shown_url
from oncely.clients.kafka.topics import largest_batch
from oncely.clients.kafka.transaction import Message
from oncely.errors import ConfigError
from oncely.lake.manifest import Contents, Manifest
from oncely.lake.records import ManifestOwner, encode, owner_key
from oncely.ledgers.topic.cluster import Cluster

_OWN_ONES = "give every pipeline a manifest topic, a schema topic and a root of its own"


@dataclass(frozen=True)
class ManifestClaim:
    """A manifest topic, claimed for a pipeline and its root.

    Attributes:
        cluster: the open clients.
        manifest: reads the topic.
        url: the URL of the root.
    """

    cluster: Cluster
    manifest: Manifest
    url: str

    @property
    def wanted(self) -> ManifestOwner:
        """The record of this pipeline and root."""
        return ManifestOwner(self.cluster.pipeline_topics.pipeline, shown_url(self.url))

    def check(self, *, moved: bool = False) -> None:
        """Refuse a topic that belongs to another pipeline or root; writes nothing.

        Args:
            moved: the user states that the root has moved (a reset): only the pipeline is compared.

        Raises:
            ConfigError: it does; the error names the owner.
            OlderFormat: it has entries, and no owner.
        """
        if self.manifest.first_owner() != self.wanted:
            self._compare(self.manifest.look(), moved=moved)

    def take(self, *, moved: bool = False) -> None:
        """Write the record if there is none, and check that it is the valid one.

        Raises:
            ConfigError: the topic belongs to another pipeline or root.
            OlderFormat: it has entries, and no owner.
            Unavailable: no answer.
        """
        if self.manifest.first_owner() == self.wanted:
            return
        contents = self.manifest.settled()
        self._compare(contents, moved=moved)
        if contents.owner != self.wanted:
            self._write(contents.owners)
            self._look_again()

    def _compare(self, contents: Contents, *, moved: bool) -> None:
        owner, wanted = contents.owner, self.wanted
        if owner is None:
            return
        if owner == wanted or (moved and owner.pipeline == wanted.pipeline):
            return
        topic = self.manifest.manifest_topic
        if owner.pipeline != wanted.pipeline:
            raise ConfigError(
                "sink.manifest_topic",
                f"{topic!r} belongs to pipeline {owner.pipeline!r} with the root {owner.root}:"
                " readers of each would find entries of files that they don't have",
                way_out=_OWN_ONES,
            )
        raise ConfigError(
            "sink.url",
            f"it is {wanted.root}, and the manifest topic {topic!r} names files below {owner.root}",
            way_out="restore sink.url. If all files were moved to the new root, `oncely "
            "offsets reset FILE --shift-by 0 --execute` confirms it",
        )

    def _write(self, owners: Iterable[ManifestOwner]) -> None:
        """Write the record, and remove those of runs that came second and died."""
        gone = [Message(None, owner_key(one.pipeline)) for one in owners]
        self._send([*gone, Message(encode(self.wanted), owner_key(self.wanted.pipeline))])

    def _look_again(self) -> None:
        """Read again: another run may have claimed the topic at the same moment, and be first."""
        contents = self.manifest.settled()
        if contents.owner not in (None, self.wanted):
            self._send([Message(None, owner_key(self.wanted.pipeline))])
            self._compare(contents, moved=False)

    def _send(self, messages: list[Message]) -> None:
        topic = self.manifest.manifest_topic
        sizes = largest_batch(self.cluster.admin, [topic])
        with self.cluster.plain(sizes.values()) as writer:
            writer.send(topic, messages)
            writer.finish()
