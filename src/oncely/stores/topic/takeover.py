"""Taking the ledger over: the next epoch, older instances fenced, a position for every partition.

A position is moved by one transactional id only, determined by its present record, and the id
belongs to the instance that initialised it last. So an instance that reads after
``init_transactions`` and commits has done a compare-and-set: if another instance had read in
between, it would have been fenced. That holds for commits and for this procedure:

1. The ids of all partitions and the publisher's are initialised, and the second ids of positions
   that are known to be moved by two ids in turn: open transactions of the earlier run end, so
   nothing in the ledger topic is hidden, and its writers are fenced.
2. The pipeline's own id is initialised, the ledger read to its end, and the next epoch written,
   with the start positions of partitions without one. From here on two openers differ.
3. Each position is written again with the new epoch and the new mode, by the id of the OLD record:
   its partition's own or second one, or the publisher's, which writes all of its positions at once.
   A new instance initialises the id, which fences a writer of the old run that has initialised it
   since step 1, and reads the present position. A writer of the old run that comes later reads the
   new epoch.
4. The partitions are noted as settled: from here on a missing position is a lost one. If another
   opener was given an epoch since, its positions decide: if it has taken one, this opener is
   fenced, else the takeover is repeated, because that opener may have died.

Instances are closed after step 1, and a few at a time are open in step 3: the number of open files
does not grow with the partitions.

A crash after 2 and before 3 does not affect the old run: it commits, and opens again. A crash
within 3 leaves some positions at the old epoch and some at the new one. The old run is fenced at
the latter; the next ``open`` begins at 1 and keeps pending start positions.

A takeover of some partitions (by a worker) initialises and writes the ids of these partitions only,
and in step 4 it updates the current pipeline's record, also if another opener was given an epoch
since. In step 2 it compares the last takeover of all partitions (docs/decisions/0036): it is
refused if a run or a reset has taken all of them since the worker's process was started. A takeover
of all partitions that reads later epochs of such takeovers in step 3 or 4 is repeated with a new
epoch.

A reset is a takeover of all partitions, after which no other run moves a position, and then:

5. The new positions are determined, and written in one transaction of the pipeline's own id, with
   the records that void older dead letters. From here on the reset takes effect completely. If
   another opener was given an epoch since and has taken no position, the takeover is repeated.
6. Another takeover writes them in its step 3, and notes the reset as done in its step 4.

Whoever writes positions of a reset initialises the id of replays first, in step 3, also for some of
the partitions: a replay that has compared before 5 is fenced or has committed, so it came before
the reset; one that compares later reads the reset. A crash after 5 leaves a reset that the next
`open` completes in the same way.

A partition is lost that was read and whose position is neither in the ledger topic nor in the
group. Only the user can determine where it continues, so a run is refused until a reset sets its
position. During that reset the partition stays among the settled ones of the pipeline's record
and gets no position: a crash before the target is noted leaves it lost, and it does not begin at
its first offset. After that its position is that of the reset, and no longer lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from oncely.core.claim import Fence, Notes, Opened, RejectCount, Takeover
from oncely.core.ranges import Position, TopicPartition, by_topic, from_tree
from oncely.errors import (
    ConfigError,
    Fenced,
    InvariantViolation,
    Stopped,
    TableMismatch,
    Unavailable,
)
from oncely.kafka.transaction import InstanceFenced, Message, Transaction
from oncely.stores.document import same_cluster, same_topics
from oncely.stores.topic.cluster import Cluster, PipelineTopics, newer
from oncely.stores.topic.compare_and_set import PositionTakeover, compare_and_set, run_concurrently
from oncely.stores.topic.records import (
    NEXT,
    OffsetMetadata,
    PipelineRecord,
    ResetRecord,
    RunMode,
    StoredPosition,
    View,
    WholeTakeovers,
    encode,
    tree_names,
)
from oncely.threads import tries


def same_target(old: PipelineRecord, target: str, name: str) -> None:
    """Refuse another destination than the pipeline has written to so far.

    Raises:
        TableMismatch: the error names both.
    """
    if old.target and old.target != target:
        raise TableMismatch(
            f"the destination is {target!r}, and pipeline {name!r} has written to {old.target!r}:"
            " the new one would begin where the old one ends",
            way_out="give the pipeline a new name to begin again; if this is meant, `oncely "
            "offsets reset FILE --shift-by 0 --execute` confirms it",
        )


def same_outputs(old: PipelineRecord, now: Mapping[str, str | None], name: str) -> None:
    """Refuse output topics that were deleted or recreated since.

    Args:
        old: the ids in the ledger.
        now: the topics' ids; None for a topic that does not exist.
        name: the name of the pipeline.

    Raises:
        TableMismatch: the error names the topic.
    """
    for topic, id_ in sorted(now.items()):
        if old.outputs.get(topic, id_) != id_:
            again = "" if id_ is None else " and recreated"
            raise TableMismatch(
                f"{topic!r} was deleted{again} since pipeline {name!r} wrote to it: its "
                "records are lost, and the pipeline would continue in the middle",
                way_out="restore the topic; or give the pipeline a new name, and a new place to "
                "write to, to begin again; into a topic of records `oncely offsets reset` sets "
                "the start, and creates the topic",
            )


def lost_partitions(
    cluster: Cluster,
    old: PipelineRecord | None,
    found: Collection[TopicPartition],
    partitions: Collection[TopicPartition],
) -> set[TopicPartition]:
    """The partitions that have had a position and have none.

    Args:
        cluster: the open clients.
        old: the pipeline's record; if it is missing, and positions or an emptied ledger topic show
            that the pipeline has written, every partition had a position.
        found: partitions that have a position.
        partitions: the source's partitions.
    """
    if old is not None:
        return set(tree_names(old.settled)) - set(found) - from_tree(old.resetting).keys()
    if found or cluster.bounds(stable=True)[0] > 0:
        return set(partitions) - set(found)
    return set()


def newest_lost_epoch(
    cluster: Cluster, old: PipelineRecord | None, lost: Collection[TopicPartition]
) -> int:
    """An upper bound of the lost positions' epochs: each was written to the ledger topic.

    A reset voids the dead letters of older epochs only, so epochs must not restart.
    """
    return cluster.bounds(stable=True)[1] if lost and old is None else 0


def refuse_lost(
    topics: PipelineTopics, lost: Collection[TopicPartition], *, resets: bool = False
) -> None:
    """Refuse to continue without these positions.

    Args:
        topics: cluster and topics of the pipeline.
        lost: the partitions; if empty, nothing is refused.
        resets: for a reset: the partitions that it leaves out.

    Raises:
        Stopped: the error names the partitions.
    """
    if not lost:
        return
    what = ", ".join(map(str, sorted(lost)))
    gone = (
        f"pipeline {topics.pipeline!r} has written before, but its positions are lost for {what}:"
        f" neither the ledger topic {topics.ledger_topic!r} nor group {topics.group!r} has a "
        "position"
    )
    if resets:
        raise Stopped(
            f"{gone}, and the reset gives none; nothing was changed",
            way_out="look in the output for the last records written; one reset must give all of"
            " them a position, without --topic or with all of them in it, and further resets with"
            " --topic can then move single ones",
        )
    raise Stopped(
        gone,
        way_out="look in the output for the last records written, and set positions with"
        " `oncely offsets reset`; or give the pipeline a new name to begin again",
    )


# -- positions of another pipeline ---------------------------------------------------------


def refuse_foreign(stamps: Mapping[TopicPartition, OffsetMetadata], topics: PipelineTopics) -> None:
    """Refuse a group that holds positions of another pipeline.

    Args:
        stamps: the group's offsets.
        topics: the group.

    Raises:
        ConfigError: the error names group and pipeline.
    """
    named = sorted({one.pipeline for one in stamps.values()} - {topics.pipeline})
    if named:
        raise ConfigError(
            "source.group",
            f"group {topics.group!r} holds positions of pipeline {', '.join(map(repr, named))}: two"
            " pipelines in one group would use each other's positions",
            way_out="name a group in source.group that no other pipeline commits to; where"
            f" {topics.pipeline!r} has written before, set its positions with"
            " `oncely offsets reset`",
        )


_TRIES = 10
_PAUSE_SECONDS = (
    0.05  # the longest before the second try, so that concurrent openers do not repeat in step
)
_MARKERS_SECONDS = 2.0
_MARKERS_POLL_SECONDS = 0.02
T = TypeVar("T")


class _Given(NamedTuple):
    """The result of step 2.

    Attributes:
        record: the pipeline's record that was written.
        found: every position.
        first: True if this is the pipeline's first start.
        whole: the takeovers of all partitions before this one.
    """

    record: PipelineRecord
    found: Mapping[TopicPartition, StoredPosition]
    first: bool
    whole: WholeTakeovers


@dataclass(frozen=True)
class TopicTakeover:
    """The takeover of the ledger by one run; see the module.

    Attributes:
        cluster: the open clients.
        run: the run's unique name, by which it recognises its epoch after a lost answer.
        target: the destination. With a reset it may differ from the previous one: the reset applies
            to the destination in the pipeline file.
        takeover: the parameters of the takeover.
        mode: the ids by which this run will move positions.
        outputs: ids of output topics, which must be the same as before.
    """

    cluster: Cluster
    run: str
    target: str
    takeover: Takeover
    mode: RunMode = "partition"
    outputs: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> Opened:
        """Execute all steps.

        Raises:
            Fenced, SourceMismatch, TableMismatch: see :meth:`Ledger.open`.
            ConfigError: the group belongs to another pipeline.
            Stopped: a position was lost, and no reset sets it.
            Unavailable: no answer, or concurrent openers without end.
        """
        self._check(self.cluster.look())  # before another run is affected
        opened = self._retried(self._take)
        if self.takeover.reset is None:
            return opened
        # Its result is valid from here on, and is kept across retries: it may depend on the present
        # positions.
        targets = dict(self.takeover.reset(opened.positions))
        opened = self._decide_reset(opened, targets)
        # Within an epoch positions only grow, so they are moved in the next one; unless another
        # run has opened since, which has moved them.
        left = replace(self.takeover, reset=None, expected=opened.fence.epoch)
        finishing = replace(self, takeover=left)
        return finishing._retried(finishing._take)

    def _retried(self, step: Callable[[], T]) -> T:
        """Repeat a step when a concurrent opener interferes."""
        last: InstanceFenced | None = None
        for done in range(_TRIES):
            time.sleep(random.uniform(0, _PAUSE_SECONDS * done))
            try:
                return step()
            except InstanceFenced as error:
                last = error
        raise last or InvariantViolation("unreachable: the loop returns or raises")

    def _take(self) -> Opened:
        """Steps 1 to 4, and the rest of a reset that was begun."""
        keys, takeover = self.cluster.keys, self.takeover
        partitions = self._partitions()
        # A replay may also have left a transaction open, which hides later messages in the ledger;
        # a running replay begins its transaction again.
        others = [keys.publisher, keys.replayer] if takeover.partitions is None else []
        seconds = [keys.second(tp) for tp in partitions if self._in_turn(tp)]
        run_concurrently(self._initialise, [*others, *map(keys.writer, partitions), *seconds])
        given = self._take_epoch(partitions)
        fence = Fence(keys.pipeline, given.record.epoch, partitions=takeover.partitions)
        begun = self._own(from_tree(given.record.resetting))
        wanted = self._own(_flat(given.record, given.found)) | begun
        takeover.require_positions(wanted)
        if begun:
            self._initialise(keys.replayer)
        source, forced = takeover.source, frozenset(begun)
        try:
            positions = PositionTakeover(self.cluster, fence, source, self.mode, forced)
            settled = positions.take(wanted, given.found)
        except Fenced as error:
            raise self._overtaken(error) from None
        # Only now: until its positions were taken, the old run may have noted another count.
        now = self._note_settled(given.record, settled, begun)
        whole = fence if takeover.partitions is None else Fence(keys.pipeline, given.whole.held)
        leaders = self._own(from_tree(now.leaders))
        starts = self.cluster.starts
        began = frozenset(tp for tp, at in settled.items() if starts.get(tp) == at)
        return Opened(fence, settled, given.first, now.counted, leaders, whole, begun=began)

    def _own(self, positions: Mapping[TopicPartition, T]) -> dict[TopicPartition, T]:
        """The positions of the partitions that are taken over."""
        own = self.takeover.partitions
        return {tp: at for tp, at in positions.items() if own is None or tp in own}

    def _overtaken(self, error: Fenced) -> Fenced | InstanceFenced:
        """The error for a position with a later epoch.

        The first takeover of all partitions by a run is fenced by another takeover of all only. It
        is repeated after takeovers of some partitions.
        """
        first = self.takeover.partitions is None and self.takeover.expected is None
        if first and self.cluster.settled().whole.given <= error.ours:
            return InstanceFenced("takeovers of some partitions were quicker")
        return error

    # -- step 1 ----------------------------------------------------------------------------

    def _partitions(self) -> list[TopicPartition]:
        """All partitions that an earlier run may be writing, as far as visible; or those wanted."""
        if self.takeover.partitions is not None:
            return sorted(self.takeover.partitions)
        return sorted({*self.takeover.earliest, *self.cluster.look().positions})

    def _in_turn(self, tp: TopicPartition) -> bool:
        """True if two ids move the position in turn, as far as visible."""
        known = self.cluster.registered().positions.get(tp)
        return known is not None and known.mode in NEXT

    def _initialise(self, identity: str) -> None:
        """Fence earlier instances of an id.

        The instance is closed at once: each holds several sockets, pipes and threads, and there
        is an id for each partition.
        """
        with self.cluster.transaction(identity) as instance:
            instance.init()

    # -- step 2 ----------------------------------------------------------------------------

    def _take_epoch(self, partitions: Collection[TopicPartition]) -> _Given:
        """Take the next epoch."""
        keys, takeover = self.cluster.keys, self.takeover
        with compare_and_set(self.cluster, keys.opener, self.cluster.settled) as (opener, view):
            self._check(view)
            old = view.pipeline
            some = takeover.partitions is not None and old is not None
            # The group offsets of other partitions may be pending in transactions of their holders.
            found = self._found(view, partitions if some else {*partitions, *view.positions})
            lost = lost_partitions(self.cluster, old, found, takeover.earliest)
            ours = old is not None and old.run == self.run and not old.settled
            first = ours or (old is None and not found and not lost)
            pending = self._pending(old, {*found, *lost}, first)
            self._refuse_lost(old, found, pending, self._own(dict.fromkeys(lost)))
            newest = newest_lost_epoch(self.cluster, old, lost)
            epoch = max([old.epoch if old else newest, *(e.epoch for e in found.values())]) + 1
            registered = PipelineRecord(
                epoch,
                self.run,
                takeover.source.cluster_id,
                {**(old.topic_ids if old else {}), **takeover.source.topic_ids},
                old.target if old and takeover.reset else self.target,
                by_topic(pending),
                _names({*found, *lost}),
                {**(old.outputs if old else {}), **({} if takeover.reset else self.outputs)},
                old.resetting if old else {},
                old.leaders if old else {},
                old.counted if old else RejectCount(),
                self._whole(view, epoch),
            )
            _write(self.cluster, opener, registered)
        self.cluster.given[takeover.partitions] = epoch
        self.cluster.starts |= {**(from_tree(old.pending) if old else {}), **pending}
        return _Given(registered, found, first, view.whole)

    def _whole(self, view: View, epoch: int) -> WholeTakeovers | msgspec.UnsetType:
        """The record's field for takeovers of all partitions, when ``epoch`` is given out."""
        if self.takeover.partitions is not None:
            return view.whole
        if view.pipeline is None or view.pipeline.whole is msgspec.UNSET:
            return msgspec.UNSET
        return WholeTakeovers(view.whole.held, epoch)

    def _found(
        self, view: View, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, StoredPosition]:
        """The ledger's positions, and those for which only the group's copy is left."""
        found: dict[TopicPartition, StoredPosition] = dict(view.positions)
        stamps = self.cluster.stamped_offsets(partitions)
        refuse_foreign(stamps, self.cluster.pipeline_topics)
        for tp, stamped in stamps.items():
            self._same_source(stamped.cluster, {tp.topic: stamped.topic_id})
            known = found[tp].entry if tp in found else None
            if newer(known, stamped.entry) == stamped.entry:
                found[tp] = stamped
        return found

    def _pending(
        self, old: PipelineRecord | None, had: Collection[TopicPartition], first: bool
    ) -> dict[TopicPartition, Position]:
        """The start positions of partitions that never had one: decided once, and kept."""
        decided = (
            self.takeover.start() if first and not old else from_tree(old.pending) if old else {}
        )
        wanted = {**self.takeover.begins, **decided}
        return {tp: at for tp, at in wanted.items() if tp not in had}

    def _refuse_lost(
        self,
        old: PipelineRecord | None,
        found: Mapping[TopicPartition, StoredPosition],
        pending: Mapping[TopicPartition, Position],
        lost: Collection[TopicPartition],
    ) -> None:
        """Refuse a pipeline that has written and has lost a position, unless a reset sets it.

        The reset is evaluated before anything is written. Its result is valid when the old run is
        fenced (:meth:`open`); the set of its partitions does not change.

        Raises:
            Stopped: a position is lost.
            InstanceFenced: another opener has taken the ledger since it was read.
        """
        if not lost:
            return
        # Another opener may have settled positions since the ledger was read: the group has them,
        # our view does not, and our opener is fenced already.
        if self.cluster.settled().pipeline != old:
            raise InstanceFenced("another run has opened meanwhile")
        if self.takeover.reset is None:
            refuse_lost(self.cluster.pipeline_topics, lost)
            return
        known = {tp: one.position for tp, one in found.items()}
        begun = from_tree(old.resetting) if old else {}
        targets = self.takeover.reset({**known, **pending, **begun})
        refuse_lost(self.cluster.pipeline_topics, set(lost) - targets.keys(), resets=True)

    def _check(self, view: View) -> None:
        """Check the source and the destination against the ledger."""
        old = view.pipeline
        if old is None:
            return
        self._same_source(old.cluster, old.topic_ids)
        if self.takeover.reset is None:
            same_target(old, self.target, self._name)
            same_outputs(old, self.outputs, self._name)
        if self.takeover.partitions is not None:
            self._refuse_whole(view)
            self._refuse_taken(view, old)
            return
        # An opener that was given an epoch and has taken no position has changed nothing yet. If it
        # continues later, it reads the epoch of the run that opened again, and is fenced.
        held = max((one.epoch for one in view.positions.values()), default=old.epoch)
        if self.takeover.expected is None or old.run == self.run:
            return
        # An interrupted takeover may have written its own epoch to positions.
        if held > max(self.takeover.expected, self.cluster.given.get(None, 0)):
            raise Fenced(self._name, self.takeover.expected, held)

    def _refuse_whole(self, view: View) -> None:
        """Refuse if all partitions were taken over since this process was started."""
        since = self.takeover.since
        if since is not None and view.whole.held > since.epoch:
            raise Fenced(self._name, since.epoch, view.whole.held)

    def _refuse_taken(self, view: View, old: PipelineRecord) -> None:
        """Refuse if another run has taken one of the partitions since ``expected``."""
        expected = self.takeover.expected
        if expected is None:
            return
        # Epochs of this process whose takeover was interrupted, or whose answer was lost.
        own = {self.cluster.given.get(self.takeover.partitions), old.epoch * (old.run == self.run)}
        epochs = {tp: one.epoch for tp, one in self._own(view.positions).items()}
        lost = {tp: one for tp, one in epochs.items() if one > expected and one not in own}
        if lost:
            raise Fenced(self._name, expected, max(lost.values()), lost)

    def _same_source(self, cluster_id: str, topic_ids: Mapping[str, str]) -> None:
        same_cluster(cluster_id, self.takeover.source, self._name)
        same_topics(topic_ids, self.takeover.source, self._name)

    # -- step 4 ----------------------------------------------------------------------------

    def _note_settled(
        self,
        registered: PipelineRecord,
        settled: Collection[TopicPartition],
        begun: Collection[TopicPartition],
    ) -> PipelineRecord:
        """Raises InstanceFenced if another opener was given an epoch and has taken no position.

        For some partitions only if a reset was completed, which that opener may have read, too.
        """
        if self.takeover.partitions is not None:
            return self._note_some(registered, settled, begun)
        names = _names([*settled, *tree_names(registered.settled)])
        try:
            return self._note(registered.epoch, pending={}, settled=names, resetting={})
        except Fenced as error:
            held = max((one.epoch for one in self.cluster.settled().positions.values()), default=0)
            if held > registered.epoch:
                raise self._overtaken(error) from None
            raise InstanceFenced("another run is opening") from None

    def _note_some(
        self,
        registered: PipelineRecord,
        settled: Collection[TopicPartition],
        begun: Collection[TopicPartition],
    ) -> PipelineRecord:
        fence = Fence(self._name, registered.epoch, partitions=self.takeover.partitions)

        def read() -> PipelineRecord:
            view = self.cluster.settled()
            now = view.pipeline or registered
            if (now.epoch, now.run) != (registered.epoch, self.run):
                fence.refuse_taken(view.entries())
                if begun:
                    raise InstanceFenced("another run is opening")
            return now

        with compare_and_set(self.cluster, self.cluster.keys.opener, read) as (opener, now):
            pending, resetting = from_tree(now.pending), from_tree(now.resetting)
            done = msgspec.structs.replace(
                now,
                pending=by_topic({tp: at for tp, at in pending.items() if tp not in settled}),
                settled=_names([*settled, *tree_names(now.settled)]),
                resetting=by_topic({tp: at for tp, at in resetting.items() if tp not in begun}),
            )
            _write(self.cluster, opener, done)
        return done

    # -- step 5 ----------------------------------------------------------------------------

    def _decide_reset(self, opened: Opened, targets: Mapping[TopicPartition, Position]) -> Opened:
        """Step 5, repeated after another takeover if necessary; returns the last takeover."""
        for _ in range(_TRIES):
            try:
                self._retried(partial(self._note_reset, opened, targets))
                return opened
            except Fenced:
                # Another opener was given an epoch. This raises Fenced if it has taken a position.
                takeover = replace(self.takeover, expected=opened.fence.epoch)
                again = replace(self, takeover=takeover)
                opened = again._retried(again._take)
        raise InstanceFenced("other runs were opening again and again")

    def _note_reset(self, opened: Opened, targets: Mapping[TopicPartition, Position]) -> None:
        """The reset takes effect completely, or not at all."""
        keys, fence = self.cluster.keys, opened.fence
        # A running replay would hide the end of the ledger.
        run_concurrently(self._initialise, [keys.publisher, keys.replayer])
        known = self.cluster.registered().pipeline
        settled = set(tree_names(known.settled)) if known else set()
        left = settled - opened.positions.keys() - targets.keys()
        refuse_lost(self.cluster.pipeline_topics, left, resets=True)
        noted = from_tree(known.leaders) if known else {}
        # The present log is accepted: leader epochs of earlier reads are void.
        leaders = {tp: one for tp, one in noted.items() if tp not in targets}
        voided = [
            Message(
                encode(ResetRecord(at, opened.positions.get(tp, msgspec.UNSET))),
                keys.reset_key(tp, fence.epoch),
            )
            for tp, at in sorted(targets.items())
        ]
        self._note(
            fence.epoch, voided, target=self.target, outputs=dict(self.outputs),
            resetting=by_topic(targets), leaders=by_topic(leaders), counted=RejectCount(),
        )  # fmt: skip

    # -- the pipeline's record ---------------------------------------------------------------

    def _note(self, epoch: int, beside: Sequence[Message] = (), **changes: Any) -> PipelineRecord:
        """Change the pipeline's record, and write related records in the same transaction.

        Returns:
            The present record.

        Raises:
            Fenced: a newer run has opened.
        """

        def read() -> PipelineRecord:
            now = self.cluster.settled().pipeline
            if now is None or now.epoch != epoch or now.run != self.run:
                raise Fenced(self._name, epoch, now.epoch if now else 0)
            return now

        ids = self.cluster.keys
        with compare_and_set(self.cluster, ids.opener, read) as (opener, now):
            done = msgspec.structs.replace(now, **changes)
            _write(self.cluster, opener, done, beside)
        return done

    @property
    def _name(self) -> str:
        return self.cluster.pipeline_topics.pipeline


def note(cluster: Cluster, fence: Fence, notes: Notes) -> None:
    """Store notes in the pipeline's record, as the run that holds the positions.

    The positions show if the run is fenced, not that record: an opener may have died before it took
    one.

    Raises:
        Fenced: a newer run holds a position.
        InstanceFenced: another run is opening.
        Unavailable: another pipeline's transaction hides the end of the ledger topic. A note can be
            written later, so it waits for the markers of our own last commit only.
    """

    def read() -> tuple[PipelineRecord, frozenset[TopicPartition]]:
        _await_end(cluster)
        view = cluster.settled()
        held = fence.held(view.entries())
        if fence.partitions is None or not held:
            fence.refuse_taken(view.entries())
        if view.pipeline is None:
            raise Fenced(fence.pipeline, fence.epoch, 0)
        return view.pipeline, held

    with compare_and_set(cluster, cluster.keys.opener, read) as (opener, (old, held)):
        noted = {
            tp: epoch
            for tp, epoch in notes.leader_epochs.items()
            if fence.partitions is None or tp in held
        }
        leaders = by_topic(from_tree(old.leaders) | noted)
        counted = notes.counted or old.counted
        if notes.counted is not None and fence.partitions is not None:
            counted = notes.counted.added_to(old.counted, notes.noted)
        _write(cluster, opener, msgspec.structs.replace(old, leaders=leaders, counted=counted))


def _await_end(cluster: Cluster) -> None:
    for _ in tries(_MARKERS_SECONDS, _MARKERS_POLL_SECONDS):
        if not cluster.hides_its_end():
            return
    raise Unavailable(
        "an open transaction hides the end of ledger topic"
        f" {cluster.pipeline_topics.ledger_topic!r}"
    )


def _write(
    cluster: Cluster,
    opener: Transaction,
    registered: PipelineRecord,
    beside: Sequence[Message] = (),
) -> None:
    """Write the pipeline's record, and related records, in one transaction."""
    topics = cluster.pipeline_topics
    opener.begin()
    record = Message(encode(registered), topics.keys.pipeline_key())
    opener.send(topics.ledger_topic, [record, *beside])
    opener.commit()


def _flat(
    registered: PipelineRecord, found: Mapping[TopicPartition, StoredPosition]
) -> dict[TopicPartition, Position]:
    return {tp: entry.position for tp, entry in found.items()} | from_tree(registered.pending)


def _names(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    names: dict[str, list[int]] = {}
    for topic, number in sorted(set(partitions)):
        names.setdefault(topic, []).append(number)
    return names
