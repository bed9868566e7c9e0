"""Replays and discards of dead letters.

In a replay, valid records become rows in the commit that removes the dead letter. The file of dead
letters is the token: a commit replaces it by a file of those that still fail, and of those that
were not processed yet. A file that the ledger does not list any more was replayed, or voided by a
reset, by another process.

In a discard, a file with chosen dead letters is replaced by a file in which these are without
content, in one commit of the table. As any other, the commit is refused unless it follows the
version of its decision: a replay at the same time comes before it, or finds the file replaced.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from oncely.core.amendments import replayed
from oncely.core.batch import Reject
from oncely.core.claim import Fence
from oncely.errors import InvariantViolation
from oncely.lake.conform import conform
from oncely.ledgers.delta import Changes, State
from oncely.sinks.base import Judged, Portion, Tried, stage_judged
from oncely.sinks.delta.sink import DeltaSink
from oncely.sinks.sql.prepare import with_source, with_tombstones

_BATCH = -1
"""Output of a replay belongs to no batch."""


@dataclass
class DeltaReplay:
    """A replay of all dead letters that exist at its begin, each processed once.

    Attributes:
        sink: the prepared sink, for rows of the pipeline's columns.
    """

    sink: DeltaSink
    _waiting: list[str] = field(default_factory=list, init=False)
    """Files that were not processed completely."""
    _began: bool = field(default=False, init=False)
    _kept: int = field(default=0, init=False)
    """Number of pending dead letters at the beginning of the first file that were processed
    already."""
    _begun: tuple[str, list[tuple[str, int]], Tried] | None = field(default=None, init=False)
    """The last commit that was begun, and the files that it writes in place of the first file."""

    @contextmanager
    def portion(self, limit: int) -> Iterator[Portion | None]:
        """Dead letters of one file; or the result of a commit whose answer was lost."""
        yield self._portion(limit)

    def _portion(self, limit: int) -> Portion | None:
        ledger = self.sink.ledger
        state = ledger.read()
        named = [path for path, _ in state.document.rejects]
        if not self._began:
            self._waiting, self._began = list(named), True
        if self._begun is not None and self._begun[0] == state.document.replay:
            _, left, done = self._begun
            return Portion((), lambda _: self._done(left, done))
        while self._waiting:
            letters = ledger.letters(self._waiting[0]) if self._waiting[0] in named else []
            if tried := [one for one in letters if one.pending][self._kept :][:limit]:
                return Portion(tried, partial(self._commit, state, letters, tried))
            self._waiting, self._kept = self._waiting[1:], 0
        return None

    def _commit(
        self,
        state: State,
        letters: Sequence[Reject],
        tried: Sequence[Reject],
        judged: Judged | None,
    ) -> Tried:
        if judged is None:
            raise InvariantViolation("dead letters were not judged")
        first = self._waiting[0]
        self.sink.begin_batch()
        fence = Fence(self.sink.pipeline, state.document.epoch)
        task = self.sink.staging(fence, _BATCH, uuid.uuid4().int >> 96)
        staged, refused = stage_judged(task, judged)
        again = [judged.again(one) for one in refused]
        pending = [one for one in letters if one.pending]
        discarded = [one for one in letters if not one.pending]
        others = [*pending[: self._kept], *pending[self._kept + len(tried) :], *discarded]
        left = self.sink.ledger.keep(state, [*again, *others])
        files = [one for one in state.document.rejects if one[0] != first]
        name = uuid.uuid4().hex
        document = msgspec.structs.replace(state.document, rejects=[*left, *files], replay=name)
        done = Tried(len(tried) - len(again), len(again))
        self._begun = name, left, done
        failed = {one.record for one in refused}
        document = self.sink.ledger.amended(document, self._changes(judged, failed))
        metadata = {"kind": "replay", "replayed": first}
        self.sink.commit(state, document, metadata, self.sink.load([staged]))
        return self._done(left, done)

    def _changes(self, judged: Judged, failed: Collection[int]) -> Changes:
        """The amendments of ranges."""
        form, chunk = self.sink.form, judged.chunk
        rows = with_source(chunk) if form.keep_source else chunk.rows
        rows, record, _, _ = with_tombstones(chunk, rows, form.keys)
        if judged.traceable:
            written = ~np.isin(record, list(failed))
            rows, record = rows.filter(pa.array(written)), record[written]
        record = judged.own(record, failed)
        digests = form.digests(chunk, conform(rows, form.schema), record) if len(record) else None
        return partial(replayed, chunk, record, failed, digests)

    def _done(self, left: list[tuple[str, int]], done: Tried) -> Tried:
        """Continue in the rest of the first file after the dead letters that were kept."""
        self._begun = None
        self._waiting[:1] = [path for path, _ in left]
        self._kept = self._kept + done.kept if left else 0
        return done


# -- discards ------------------------------------------------------------------------------


def discard_letters(
    sink: DeltaSink, which: Callable[[Reject], bool], execute: bool
) -> Counter[str]:
    """Discard pending dead letters: see
    :meth:`oncely.pipeline.destination.Destination.discarding`. The sink may be without columns."""
    ledger, reasons = sink.ledger, Counter[str]()
    state = ledger.read()
    rejects, replaced = list(state.document.rejects), dict[str, str]()
    for at, (path, pending) in enumerate(rejects):
        letters = ledger.letters(path) if pending else []
        left = [one.discarded if one.pending and which(one) else one for one in letters]
        chosen = [new for new, old in zip(left, letters, strict=True) if new is not old]
        reasons.update(one.reason for one in chosen)
        if chosen and execute:
            [rejects[at]] = ledger.keep(state, left)
            replaced[rejects[at][0]] = path
    if replaced:
        document = msgspec.structs.replace(state.document, rejects=rejects)
        ledger.commit(state, document, {"kind": "discard", "replaced": replaced})
    if execute:  # the replaced files, also those of an attempt whose answer was lost
        ledger.tidy(Fence(sink.pipeline, state.document.epoch))
    return reasons
