"""Replay of dead letters: valid records become files, published in the replay's transaction.

A replay may extend schemas, and so may a concurrent run of the pipeline. Both write by the
publisher's transactional id, so only the instance that has initialised it last can commit: the
schemas that it has read are the newest until that commit. The other instance is fenced, and begins
its transaction again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from oncely.clients.kafka.transaction import Message
from oncely.core.amendments import replayed
from oncely.core.batch import Staged, StagedRowsGone
from oncely.core.claim import Fence
from oncely.lake.manifest import read_receipt
from oncely.sinks.base import Judged, stage_judged
from oncely.sinks.files.sink import FilesSink
from oncely.sinks.kafka.replay import Passed, TopicReplay

_BATCH = -1
"""Output of a replay belongs to no batch."""


def replay_into_files(sink: FilesSink) -> TopicReplay:
    """A replay of a prepared sink, by the publisher's transactional id: see the module."""
    publisher, write = sink.pipeline_topics.keys.publisher, partial(_staged, sink)
    return TopicReplay(sink.ledger, sink.rejects_topic, publisher, write, sink.close)


def _staged(sink: FilesSink, judged: Judged) -> Passed:
    """Write the rows into files that are not visible yet."""
    sink.begin_batch()
    view = sink.cluster.look().pipeline
    fence = Fence(sink.pipeline_topics.pipeline, 0 if view is None else view.epoch)
    task = sink.staging(fence, _BATCH, uuid.uuid4().int >> 96)
    staged, refused = stage_judged(task, judged)
    named = [sink.topics.manifest, sink.topics.schema]
    load = sink.load(fence)  # no file of it is older than the begin of the batch
    failed = {one.record for one in refused}
    written = judged.chunk.row_record
    if judged.traceable:
        written = written[~np.isin(written, list(failed))]
    changes = partial(replayed, judged.chunk, judged.own(written, failed), failed, None)
    return Passed(named, refused, partial(_messages, sink, staged, fence), load.fresh, changes)


def _messages(sink: FilesSink, staged: Staged, fence: Fence) -> Mapping[str, Sequence[Message]]:
    """Extended schemas, and the files."""
    load = sink.load(fence)
    load.ready()
    receipts = [read_receipt(staged.name)] if staged.name else []
    if not sink.agree(staged):
        raise StagedRowsGone("schemas were extended meanwhile; the dead letters are repeated")
    found: dict[str, Sequence[Message]] = {}
    for topic, messages in load.messages(receipts, ()):
        found[topic] = [*found.get(topic, ()), *messages]
    return found
