"""Dead letters tried again: what passes now becomes files, named in the replay's transaction.

A replay may widen schemas, and so may the pipeline that runs beside it. Both move by the
publisher's transactional id, so whoever has initialised it last is the only one that commits:
the schemas that are read then are the newest ones until that commit. The other one finds itself
fenced, and begins its transaction again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oncely.clients.kafka.transaction import Message
from oncely.core.batch import Rejection, Staged, StagedRowsGone
from oncely.core.claim import Fence
from oncely.lake.records import read_receipt
from oncely.ledgers.topic.cluster import PipelineTopics
from oncely.sinks.files.sink import FilesSink
from oncely.sinks.replaying import Judged

_BATCH = -1
"""What a replay publishes belongs to no micro-batch."""


@dataclass(frozen=True)
class ToFiles:
    """The output of a files sink.

    Attributes:
        sink: for rows of the pipeline's columns, prepared.
    """

    sink: FilesSink

    @property
    def place(self) -> PipelineTopics:
        """The sink's."""
        return self.sink.place

    @property
    def rejects_topic(self) -> str:
        """The sink's."""
        return self.sink.rejects_topic

    @property
    def target(self) -> str:
        """Root and manifest."""
        return self.sink.target

    @property
    def replayer(self) -> str:
        """The publisher's: see the module."""
        return self.place.words.publisher

    def close(self) -> None:
        """Close the sink's connections."""
        self.sink.close()

    def tried(self, judged: Judged) -> Tried:
        """Write the rows into files that nobody reads yet."""
        sink = self.sink
        sink.begin_batch()
        view = sink.cluster.look().pipeline
        fence = Fence(self.place.pipeline, 0 if view is None else view.epoch)
        task = sink.staging(fence, _BATCH, uuid.uuid4().int >> 96)
        if not judged.traceable:
            task.add_rows(judged.chunk.rows)
            return Tried(sink, task.finish(), fence, judged.chunk.rejections)
        refused = [*judged.chunk.rejections, *task.add(judged.chunk)]
        staged = task.finish()
        return Tried(sink, staged, fence, sorted(refused))


@dataclass(frozen=True)
class Tried:
    """Staged files of records that pass; see :class:`oncely.sinks.kafka.replay.Passed`."""

    sink: FilesSink
    staged: Staged
    fence: Fence
    refused: Sequence[Rejection]

    @property
    def topics(self) -> Sequence[str]:
        """Manifest and schemas."""
        return [self.sink.topics.manifest, self.sink.topics.schema]

    def messages(self) -> Mapping[str, Sequence[Message]]:
        """Schemas that have grown, and the files."""
        load = self.sink.load
        load.ready()
        receipts = [read_receipt(self.staged.name)] if self.staged.name else []
        if not self.sink.agree(self.staged):
            raise StagedRowsGone("schemas were widened meanwhile; the letters are tried again")
        found: dict[str, Sequence[Message]] = {}
        for topic, messages in load.messages(receipts, self.fence, ()):
            found[topic] = [*found.get(topic, ()), *messages]
        return found

    def fresh(self) -> None:
        """Refuse files that may have been vacuumed meanwhile."""
        self.sink.load.fresh()
