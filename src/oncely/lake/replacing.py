"""Named files are replaced by others in one transaction of the manifest: compactions and rewrites.

New files are written first, under new unique names. Then one Kafka transaction names them, and
takes the old names out. All such transactions of a pipeline share one transactional id, and each
has a producer instance of its own; its order is the compare-and-set, as everywhere:

1. ``init_transactions``: an earlier transaction ends, and its process is fenced.
2. The manifest is read, settled, and compared. Only transactions of this id remove files (a run
   only adds some), and only this instance can commit one now. So a file that is named here is named
   until our commit, or we are fenced and commit nothing.
3. Begin, send, and wait until the broker has the messages: from here on the coordinator's clock
   runs, and the transaction ends within its timeout. Only then the age of the new files is checked.
   A process that is paused before has the age refused; for a process that is paused after it, the
   broker aborts. ``vacuum`` cannot intervene between them: see there.
4. Commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from oncely.clients.files.store import Store
from oncely.clients.kafka.transaction import Message, Transaction
from oncely.errors import Stopped
from oncely.lake.manifest import Contents, Manifest
from oncely.lake.records import ManifestFile, encode, path_key
from oncely.ledgers.topic.cluster import Cluster
from oncely.ledgers.topic.compare_and_set import compare_and_set

_FRAME = 1_000  # bytes of a batch and a record around key and value


@dataclass(frozen=True)
class Replacing:
    """Replaces named files of one pipeline.

    Attributes:
        cluster: open clients.
        manifest: reads the manifest, and names its topic.
        store: the root of the files.
        max_staging_age: seconds after which new files are too old to be named.
        largest: ``max.message.bytes`` of the manifest topic.
    """

    cluster: Cluster
    manifest: Manifest
    store: Store
    max_staging_age: float
    largest: int

    @contextmanager
    def compared(self, sizes: Collection[int] = ()) -> Iterator[tuple[Transaction, Contents]]:
        """An initialised transaction, and the files that are named until its commit.

        Args:
            sizes: ``max.message.bytes`` of other topics of the transaction.
        """
        identity = f"oncely/{self.cluster.pipeline_topics.pipeline}//compact"
        with compare_and_set(
            self.cluster, identity, self.manifest.settled, [self.largest, *sizes]
        ) as found:
            yield found

    def commit(
        self,
        transaction: Transaction,
        messages: Mapping[str, Sequence[Message]],
        since: datetime,
    ) -> None:
        """Send messages by topic, and commit.

        Args:
            since: the store's time before the first new file was written.

        Raises:
            Stopped: the new files are too old; nothing was published.
        """
        transaction.begin()
        for topic, own in messages.items():
            transaction.send(topic, own)
        transaction.flush(self.cluster.pipeline_topics.timeout)
        age = self.store.now() - since
        if age > timedelta(seconds=self.max_staging_age):
            raise Stopped(
                f"writing took {age}, longer than sink.max_staging_age: a vacuum may have "
                "removed the files, so nothing is published",
                way_out="run it again; or raise sink.max_staging_age",
            )
        transaction.commit()

    def together(self, made: Sequence[ManifestFile], gone: Sequence[str]) -> list[Message]:
        """Messages by which some files replace others at once.

        A reader may see only the first of them: it contains all. The others repeat it, each file
        under its own key, so that Kafka's compaction keeps exactly the files that are named.

        Raises:
            Stopped: the first message would be too large.
        """
        dead = [Message(None, path_key(path)) for path in gone]
        if not made:
            return dead
        first, *rest = made
        first = msgspec.structs.replace(first, replaces=list(gone))
        whole = msgspec.structs.replace(first, along=rest)
        if len(encode(whole)) > self.largest - _FRAME:
            raise Stopped(
                f"{len(made):,} files would replace {len(gone):,} at once, and the message that"
                f" names them exceeds max.message.bytes of {self.manifest.manifest_topic!r}"
                f" ({self.largest:,})",
                way_out="raise max.message.bytes of the topic",
            )
        again = [first] if rest else []
        named = [Message(encode(one), path_key(one.path)) for one in (whole, *rest)]
        return [*named, *dead, *(Message(encode(one), path_key(one.path)) for one in again)]
