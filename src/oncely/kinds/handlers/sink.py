"""The sink of handlers: what they do with the database, dead letters, history and positions take
effect in one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np

from oncely.context import TRACE, using
from oncely.core.batch import Chunk, CommitBudget, IntArray, Rejection
from oncely.core.claim import Claim, Counts, Fence, Finished, Opened, PositionMoved, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import GivenUp, OncelyError, Stopped, Unavailable, WrongInput
from oncely.kinds.handlers.batch import Batch, Portion
from oncely.kinds.sql_ledger import Refused, letters_of
from oncely.stores.sql.connection import BadData, Connection, LoanBroken
from oncely.stores.sql.ledger import SqlLedger
from oncely.telemetry import processing
from oncely.users_function import returned, said, users_function

log = logging.getLogger(__name__)

Handler = Callable[[Batch, Any], object]
"""Called with a batch and the open transaction; with single records if ``one_by_one`` is true."""

_LONGEST_PAUSE = 10.0  # seconds
_SECONDS_A_LINE = 30.0  # between lines of the log


class HandlerFailed(Exception):
    """A handler has raised an error that may be the fault of a record.

    Attributes:
        batch: what it was called with.
        reason: the error.
    """

    def __init__(self, batch: Portion, reason: str) -> None:
        self.batch, self.reason = batch, reason
        super().__init__(reason)


@dataclass(frozen=True)
class OnError:
    """What follows errors of handlers.

    Attributes:
        retries: how often the transaction is repeated first.
        reject: then reject the records at fault; otherwise stop.
        pause: seconds before the first repetition; doubled after each failure.
    """

    retries: int = 3
    reject: bool = True
    pause: float = 0.2


@dataclass(frozen=True)
class HandlersSink:
    """Handlers of topics, in the database of the ledger.

    Attributes:
        ledger: the ledger; its own table is the destination table for it.
        handlers: by topic.
        on_error: what follows their errors.
        time_limit: seconds that one call may take.
        context: the headers that are a record's context.
        threads: the number of threads of each topic's partitions, if there are several.
    """

    ledger: SqlLedger
    handlers: Mapping[str, Handler]
    on_error: OnError = field(default_factory=OnError)
    time_limit: float = 60.0
    context: Collection[str] = TRACE
    threads: Mapping[str, int] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """The headers of every record; its key, if threads divide the records by it."""
        return frozenset({"headers", "key"} if self.threads else {"headers"})

    def prepare(self) -> None:
        """Does nothing: :meth:`open` creates the ledger's tables, and handlers have their own."""

    def open(self, takeover: Takeover) -> Opened:
        """Take over the ledger."""
        return self.ledger.open(takeover)

    def bind(self) -> HandlersSink:
        """The same sink: there are no columns to compare."""
        return self

    def close(self) -> None:
        """Does nothing: sessions end with their process, or in a takeover."""

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> Mapping[TopicPartition, Counts]:
        """Call the handlers, then compare-and-set, then COMMIT."""
        found = self._committed(chunk, fence, claim, max_rejects)
        return {tp: one.counts for tp, (one,) in found.items()}

    def finish(
        self, chunk: Chunk, fence: Fence, claim: Claim, max_rejects: int | None = None
    ) -> Mapping[TopicPartition, Sequence[Finished]]:
        """As :meth:`commit`, for the ranges of ``claim.parts``; other threads commit others."""
        return self._committed(chunk, fence, claim, max_rejects)

    def _committed(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None
    ) -> Mapping[TopicPartition, Sequence[Finished]]:
        """Attempts at one transaction, until handlers refuse no more records.

        Records that a handler refuses become dead letters, which are fetched from the broker
        outside of transactions; then the handlers are called again without them.
        """
        budget = CommitBudget(max_rejects, "decode, transform or handler")
        budget.spend(chunk.rejections)
        refused, letters = list(chunk.rejections), letters_of(chunk, chunk.rejections)
        failures, told, turn = 0, "", _Turn(chunk.given_up)
        while True:
            attempt = _Attempt(self, chunk, fence, claim, refused, max_rejects, turn)
            attempt.isolates = failures > self.on_error.retries
            try:
                return attempt.commit(letters)
            except Refused as error:
                budget.spend(error.rejections)
                refused += error.rejections
                letters += letters_of(chunk, error.rejections)
            except HandlerFailed as error:
                failures += 1
                if turn.to_tell() or error.reason != told:
                    log.warning("%s (attempt %d)", self._about(error), failures)
                    told = error.reason
                if failures <= self.on_error.retries:
                    turn.wait(min(self.on_error.pause * 2 ** (failures - 1), _LONGEST_PAUSE))
                elif not self.on_error.reject:
                    self._stop(error)

    def _stop(self, error: HandlerFailed) -> NoReturn:
        raise Stopped(
            f"{self._about(error)}; nothing of this was committed",
            way_out='correct the handler or the record; or sink.on_error = "reject"',
        ) from error

    def _about(self, error: HandlerFailed) -> str:
        batch, (first, last) = error.batch, error.batch.offsets
        name = name_of(self.handlers[batch.topic])
        where = f"{batch.topic}-{batch.partition}, offsets {first} to {last}"
        return f"handler {name}: {where}: {error.reason}"


@dataclass
class _Turn:
    """The time of a commit, over all of its attempts.

    Attributes:
        given_up: of the chunk.
        told: when a line of its progress was due last.
    """

    given_up: Callable[[float], bool] | None
    told: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float) -> None:
        """Raises GivenUp as soon as nobody waits for the commit any more."""
        if self.given_up is None:
            time.sleep(seconds)
        elif self.given_up(seconds):
            raise GivenUp("calls of handlers were ended: nobody waits for their commit any more")

    def to_tell(self) -> bool:
        """True once in a while."""
        now = time.monotonic()
        due = now - self.told >= _SECONDS_A_LINE
        self.told = now if due else self.told
        return due


@dataclass
class _Attempt:
    """One transaction.

    Attributes:
        refused: the records that are not handled.
        turn: the time of the commit.
        isolates: find the records at fault of an error.
    """

    sink: HandlersSink
    chunk: Chunk
    fence: Fence
    claim: Claim | None
    refused: Collection[Rejection]
    max_rejects: int | None
    turn: _Turn
    isolates: bool = False

    def commit(self, letters: Any) -> Mapping[TopicPartition, Sequence[Finished]]:
        """Execute the transaction.

        Raises:
            Refused: handlers have refused records; the transaction was rolled back.
            HandlerFailed: a handler has failed, and records are not isolated.
        """
        sink, gone = self.sink, {one.record for one in self.refused}
        found: list[Rejection] = []
        with sink.ledger.transaction(self.fence) as ours:
            for batch in self._batches(gone):
                self._handle(ours, batch, found)
            if found:
                raise Refused(found)
            sink.ledger.dead_letters.add(ours, letters, self.fence.epoch)
            handled = self._handled(gone)
            if self.claim is not None and self.claim.parts:
                parts = self.chunk.counts_of(self.claim.parts, handled, list(self.refused))
                return sink.ledger.finish(ours, self.claim, parts)
            counts = self.chunk.counts(handled, list(self.refused))
            if self.claim is not None:
                sink.ledger.compare_and_set(ours, self.claim, counts)
        return {tp: [Finished(self.chunk.ranges[tp], one, "data")] for tp, one in counts.items()}

    def _batches(self, gone: Collection[int]) -> Iterator[Portion]:
        """What the handlers are called with, in order."""
        for batch in Portion.of(self.chunk, gone, self.sink.context):
            if getattr(self.sink.handlers[batch.topic], "one_by_one", False):
                yield from batch.one_by_one()
            else:
                yield batch

    def _handle(self, ours: Connection, batch: Portion, found: list[Rejection]) -> None:
        """Handle a batch; with ``isolates`` halve it until the records at fault are found."""
        self.turn.wait(0)
        if self.isolates and self.turn.to_tell():
            at, refused = batch.offsets[0], len(self.refused) + len(found)
            text = "isolating records on which handlers fail: at %s-%d, offset %d; %d refused"
            log.warning(text, batch.topic, batch.partition, at, refused)
        try:
            self._call(ours, batch)
            found += batch.rejections
        except HandlerFailed as error:
            # What another attempt has committed may look like an error of a record.
            if self.claim is not None and self.sink.ledger.has_moved(ours, self.claim):
                raise PositionMoved("handled by another attempt") from None
            if not self.isolates:
                raise
            if batch.only is None:
                for half in batch.halves():
                    self._handle(ours, half, found)
            else:
                found.append(Rejection(batch.only, "handle", error.reason))
        if self.max_rejects is not None and len(self.refused) + len(found) > self.max_rejects:
            raise Refused(found)

    def _call(self, ours: Connection, batch: Portion) -> None:
        handler = self.sink.handlers[batch.topic]
        about = partial("handler {}: {}".format, name_of(handler))
        batch.forget_rejections()
        try:
            with (
                using(lambda: batch.context),
                processing(batch.messages),
                ours.lend(self.sink.time_limit) as tx,
                users_function(),
            ):
                returned(handler(batch, tx))
        except Unavailable:
            raise
        except BadData as error:
            raise HandlerFailed(batch, _told(error.reason, error.__cause__)) from error
        except OncelyError as error:
            kind = WrongInput if isinstance(error, WrongInput) else Stopped
            raise kind(about(error.message), way_out=_CORRECT) from error
        except LoanBroken as error:
            raise Stopped(about(error.reason), way_out=_CORRECT) from error
        except Exception as error:  # the user's own code: it may raise any exception
            raise HandlerFailed(batch, _told(said(error), error)) from error

    def _handled(self, gone: Collection[int]) -> IntArray:
        handled = np.concatenate([self.chunk.row_record, self.chunk.delete_record])
        return handled[~np.isin(handled, sorted(gone))].astype(np.int64)


_CORRECT = "correct the handler; the positions have not moved"


def name_of(handler: Handler) -> str:
    """The name of a handler, for messages."""
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(handler)


def _told(reason: str, error: BaseException | None) -> str:
    """The reason, with the line of the user's code that has raised the error."""
    places = []
    trace = None if error is None else error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_library(code.co_filename):
            places.append(f"{PurePath(code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{reason} ({places[-1]})" if places else reason


def _is_library(file: str) -> bool:
    parts = PurePath(file).parts
    return "site-packages" in parts or file.startswith("<") or PurePath(file).is_relative_to(_OURS)


_OURS = PurePath(__file__).parents[2]
