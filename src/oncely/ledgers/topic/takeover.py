"""Taking the ledger over: the next epoch, older instances fenced, a position for every partition.

From where it stands a position is moved by one transactional id only, and its owner is who
initialised it last. So an instance that reads after ``init_transactions`` and commits has done a
compare-and-set: had another one read in between, it would have been fenced. That holds for
commits and for this:

1. The ids of all partitions and the publisher's are initialised: what the earlier run left open
   ends, so nothing in the ledger topic is hidden, and its writers are fenced.
2. The pipeline's own id is initialised, the ledger read to its end, and the next epoch written,
   with the positions where partitions begin that have none. From here on two openers differ.
3. Each position is written again with the new epoch and the new mode, by the id that the OLD
   one names: its partition's own, or the publisher's, which writes all of its positions at
   once. A new instance initialises the id, which fences a writer of the old run that has
   initialised it since step 1, and reads where the position stands now. A writer of the old run
   that comes later reads the new epoch.
4. The partitions are noted as settled: from here on a missing position is a lost one. Where
   another opener was given an epoch since, its positions tell: when it has taken one this opener
   is fenced, else the takeover is done again, because that opener may have died.

Instances are closed after step 1, and a few at a time are open in step 3: the number of open files
does not grow with the partitions.

A crash after 2 and before 3 leaves the old run unharmed: it commits, and opens again. One within 3
leaves some positions at the old epoch and some at the new one. The old run is fenced at the latter;
the next ``open`` begins at 1 and keeps what is pending.

A reset is such a takeover, after which nobody else moves a position, and then:

5. Where positions are put is decided, and written in one transaction of the pipeline's own id,
   with the records that void older dead letters. From here on the reset takes effect, whole.
6. Another takeover puts them there in its step 3, and notes the reset as done in its step 4.

The step 1 of that one initialises the ids of replays: a replay that has compared before 5 is
fenced or has committed, so it came before the reset; one that compares later finds the reset. A
crash after 5 leaves a reset that the next ``open`` finishes in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from oncely.clients.kafka.transaction import InstanceFenced, Message, Transaction
from oncely.core.budget import RejectCount
from oncely.core.claim import Fence, Notes, Opened, Takeover
from oncely.core.topics import Position, TopicPartition
from oncely.errors import (
    Fenced,
    InvariantViolation,
    TableMismatch,
    Unavailable,
)
from oncely.ledgers.same_source import same_cluster, same_topics
from oncely.ledgers.topic.cluster import Cluster, newer
from oncely.ledgers.topic.compare_and_set import compare_and_set, run_concurrently
from oncely.ledgers.topic.foreign import refuse_foreign
from oncely.ledgers.topic.lost import lost_partitions, newest_lost_epoch, refuse_lost
from oncely.ledgers.topic.records import (
    Mode,
    PipelineRecord,
    ResetRecord,
    StoredPosition,
    View,
    by_topic,
    encode,
    from_tree,
    tree_names,
)
from oncely.ledgers.topic.settling import Settling

_TRIES = 5
_MARKERS_SECONDS = 2.0
_MARKERS_POLL_SECONDS = 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class Opener:
    """One run's way to the ledger; see the module.

    Attributes:
        cluster: the open clients.
        run: the run's own name, by which it finds an epoch whose answer was lost.
        target: where records go. With a reset they may have gone elsewhere so far: a person who
            says where to go on says so for the target that the file names.
        takeover: from where, and with which reset.
        mode: by which ids this run will move positions.
        outputs: topic ids of output topics that must still be the ones that were written to.
    """

    cluster: Cluster
    run: str
    target: str
    takeover: Takeover
    mode: Mode = "partition"
    outputs: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> Opened:
        """All steps.

        Raises:
            Fenced, SourceMismatch, TableMismatch: as the port says.
            ConfigError: the group is another pipeline's.
            Stopped: a position was lost, and no reset says where its partition goes on.
            Unavailable: no answer, or rivals without end.
        """
        self._check(self.cluster.look())  # before anybody is disturbed
        opened = self._retried(self._take)
        if self.takeover.reset is None:
            return opened
        # Its answer counts from here on, and is kept whatever is tried again: it may depend on
        # where positions stand.
        targets = dict(self.takeover.reset(opened.positions))
        self._retried(lambda: self._note_reset(opened, targets))
        # Within an epoch positions only grow, so they are moved in the next one; unless another
        # run has opened since, which has moved them.
        left = replace(self.takeover, reset=None, expected=opened.fence.epoch)
        finishing = replace(self, takeover=left)
        return finishing._retried(finishing._take)

    def _retried(self, step: Callable[[], T]) -> T:
        """Do it again when a rival is doing the same."""
        last: InstanceFenced | None = None
        for _ in range(_TRIES):
            try:
                return step()
            except InstanceFenced as error:
                last = error
        raise last or InvariantViolation("a loop that returns or raises has ended")

    def _take(self) -> Opened:
        """Steps 1 to 4, and what is left of a reset that was begun."""
        words = self.cluster.place.words
        partitions = self._partitions()
        # A replay too may have left a transaction open, which hides what follows in the ledger;
        # one that is under way begins its transaction again.
        ids = [words.publisher, words.replayer, *map(words.writer, partitions)]
        run_concurrently(self._initialise, ids)
        registered, found, first = self._take_epoch(partitions)
        fence = Fence(words.pipeline, registered.epoch)
        positions = {
            tp: found[tp].position if tp in found else at
            for tp, at in _flat(registered, found).items()
        }
        begun = from_tree(registered.resetting)
        settling = Settling(self.cluster, fence, self.takeover.source, self.mode, frozenset(begun))
        settled = settling.settle(positions | begun, found)
        # Only now: until its positions were taken, the old run may have noted another count.
        now = self._note_settled(registered, settled)
        return Opened(fence, settled, first, now.counted, from_tree(now.leaders))

    # -- step 1 ----------------------------------------------------------------------------

    def _partitions(self) -> list[TopicPartition]:
        """All that an earlier run may be writing, as far as can be seen."""
        return sorted({*self.takeover.earliest, *self.cluster.look().positions})

    def _initialise(self, identity: str) -> None:
        """Fence earlier instances of an id.

        The instance is closed at once: each holds several sockets, pipes and threads, and there
        is an id for each partition.
        """
        with self.cluster.transaction(identity) as instance:
            instance.init()

    # -- step 2 ----------------------------------------------------------------------------

    def _take_epoch(
        self, partitions: Collection[TopicPartition]
    ) -> tuple[PipelineRecord, dict[TopicPartition, StoredPosition], bool]:
        """The next epoch; every position that there is; and whether this is the first start."""
        words = self.cluster.place.words
        with compare_and_set(self.cluster, words.opener, self.cluster.settled) as (opener, view):
            self._check(view)
            found = self._found(view, {*partitions, *view.positions})
            old = view.pipeline
            lost = lost_partitions(self.cluster, old, found, self.takeover.earliest)
            ours = old is not None and old.run == self.run and not old.settled
            first = ours or (old is None and not found and not lost)
            pending = self._pending(old, {*found, *lost}, first)
            self._refuse_lost(old, found, pending, lost)
            newest = newest_lost_epoch(self.cluster, old, lost)
            epochs = [old.epoch if old else newest, *(e.epoch for e in found.values())]
            registered = PipelineRecord(
                max(epochs) + 1,
                self.run,
                self.takeover.source.cluster_id,
                {**(old.topic_ids if old else {}), **self.takeover.source.topic_ids},
                old.target if old and self.takeover.reset else self.target,
                by_topic(pending),
                _names({*found, *lost}),
                {**(old.outputs if old else {}), **({} if self.takeover.reset else self.outputs)},
                old.resetting if old else {},
                old.leaders if old else {},
                old.counted if old else RejectCount(),
            )
            _write(self.cluster, opener, registered)
        self.cluster.given = registered.epoch
        return registered, found, first

    def _found(
        self, view: View, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, StoredPosition]:
        """The ledger's positions, and those of which only the group's copy is left."""
        found: dict[TopicPartition, StoredPosition] = dict(view.positions)
        stamps = self.cluster.stamped_offsets(partitions)
        refuse_foreign(stamps, view.positions, self.cluster.place)
        owns, group = self.cluster.place.words.owns, self.cluster.place.group
        for tp, stamped in stamps.items():
            if not owns(stamped, group):
                continue  # it has no name: the ledger topic knows
            self._same_source(stamped.cluster, {tp.topic: stamped.topic_id})
            known = found[tp].entry if tp in found else None
            if newer(known, stamped.entry) == stamped.entry:
                found[tp] = stamped
        return found

    def _pending(
        self, old: PipelineRecord | None, had: Collection[TopicPartition], first: bool
    ) -> dict[TopicPartition, Position]:
        """Where partitions begin that never had a position: decided once, and kept."""
        decided = (
            self.takeover.start() if first and not old else from_tree(old.pending) if old else {}
        )
        wanted = {**self.takeover.earliest, **decided}
        return {tp: at for tp, at in wanted.items() if tp not in had}

    def _refuse_lost(
        self,
        old: PipelineRecord | None,
        found: Mapping[TopicPartition, StoredPosition],
        pending: Mapping[TopicPartition, Position],
        lost: Collection[TopicPartition],
    ) -> None:
        """A pipeline that has written must find where it was, or be told by a reset.

        The reset is asked before anything is written. Its answer counts when the old run is fenced
        (:meth:`open`); whether it has one for a partition does not change.

        Raises:
            Stopped: nobody knows a position that has been there.
            InstanceFenced: a rival has taken the ledger since it was read.
        """
        if not lost:
            return
        # A rival may have opened since the ledger was read, and settled positions: the group
        # shows them, our view does not, and our opener is fenced already.
        if self.cluster.settled().pipeline != old:
            raise InstanceFenced("another run has opened meanwhile")
        if self.takeover.reset is None:
            refuse_lost(self.cluster.place, lost)
            return
        known = {tp: one.position for tp, one in found.items()}
        begun = from_tree(old.resetting) if old else {}
        targets = self.takeover.reset({**known, **pending, **begun})
        refuse_lost(self.cluster.place, set(lost) - targets.keys(), resets=True)

    def _check(self, view: View) -> None:
        """Compare with the ledger's words on this pipeline."""
        old = view.pipeline
        if old is None:
            return
        self._same_source(old.cluster, old.topic_ids)
        if self.takeover.reset is None:
            same_target(old, self.target, self._name)
            same_outputs(old, self.outputs, self._name)
        # A rival that was given an epoch and has taken no position has changed nothing yet. Should
        # it come alive later, it finds the epoch of whoever opened again, and is fenced.
        held = max((one.epoch for one in view.positions.values()), default=old.epoch)
        if self.takeover.expected is None or old.run == self.run:
            return
        # An opening that was cut short may have given positions the epoch of its own.
        if held > max(self.takeover.expected, self.cluster.given):
            raise Fenced(self._name, self.takeover.expected, held)

    def _same_source(self, cluster_id: str, topic_ids: Mapping[str, str]) -> None:
        same_cluster(cluster_id, self.takeover.source, self._name)
        same_topics(topic_ids, self.takeover.source, self._name)

    # -- step 4 ----------------------------------------------------------------------------

    def _note_settled(
        self, registered: PipelineRecord, settled: Iterable[TopicPartition]
    ) -> PipelineRecord:
        """Raises InstanceFenced where a rival was given an epoch and has taken no position."""
        names = _names([*settled, *tree_names(registered.settled)])
        try:
            return self._note(registered.epoch, pending={}, settled=names, resetting={})
        except Fenced:
            held = max((one.epoch for one in self.cluster.settled().positions.values()), default=0)
            if held > registered.epoch:
                raise
            raise InstanceFenced("another run is opening") from None

    # -- step 5 ----------------------------------------------------------------------------

    def _note_reset(self, opened: Opened, targets: Mapping[TopicPartition, Position]) -> None:
        """The reset takes effect, or nothing of it."""
        words, fence = self.cluster.place.words, opened.fence
        # A replay that is under way would hide the end of the ledger.
        run_concurrently(self._initialise, [words.publisher, words.replayer])
        known = self.cluster.registered().pipeline
        settled = set(tree_names(known.settled)) if known else set()
        left = settled - opened.positions.keys() - targets.keys()
        refuse_lost(self.cluster.place, left, resets=True)
        noted = from_tree(known.leaders) if known else {}
        # The log is taken as it is now: no leader epoch of what was read before counts.
        leaders = {tp: one for tp, one in noted.items() if tp not in targets}
        voided = [
            Message(encode(ResetRecord(at)), words.reset_key(tp, fence.epoch))
            for tp, at in sorted(targets.items())
        ]
        self._note(
            fence.epoch, voided, target=self.target, outputs=dict(self.outputs),
            resetting=by_topic(targets), leaders=by_topic(leaders), counted=RejectCount(),
        )  # fmt: skip

    # -- the pipeline's record ---------------------------------------------------------------

    def _note(self, epoch: int, beside: Sequence[Message] = (), **changes: Any) -> PipelineRecord:
        """Change the pipeline's record, and write what belongs to it in the same transaction.

        Returns:
            The record as it is now.

        Raises:
            Fenced: a newer run has opened.
        """

        def read() -> PipelineRecord:
            now = self.cluster.settled().pipeline
            if now is None or now.epoch != epoch or now.run != self.run:
                raise Fenced(self._name, epoch, now.epoch if now else 0)
            return now

        ids = self.cluster.place.words
        with compare_and_set(self.cluster, ids.opener, read) as (opener, now):
            done = msgspec.structs.replace(now, **changes)
            _write(self.cluster, opener, done, beside)
        return done

    @property
    def _name(self) -> str:
        return self.cluster.place.pipeline


def note(cluster: Cluster, fence: Fence, notes: Notes) -> None:
    """Keep notes in the pipeline's record, as the run that holds the positions.

    The positions tell whether the run is fenced, not that record: an opener may have died before
    it took one.

    Raises:
        Fenced: a newer run holds a position.
        InstanceFenced: a rival is opening.
        Unavailable: another pipeline's transaction hides the end of the ledger topic. A note can
            be written later, so it waits for the markers of our own last commit only.
    """

    def read() -> PipelineRecord:
        _await_end(cluster)
        view = cluster.settled()
        newest = max((one.epoch for one in view.positions.values()), default=0)
        if view.pipeline is None or newest > fence.epoch:
            raise Fenced(fence.pipeline, fence.epoch, newest)
        return view.pipeline

    with compare_and_set(cluster, cluster.place.words.opener, read) as (opener, old):
        leaders = by_topic(from_tree(old.leaders) | dict(notes.leader_epochs))
        counted = old.counted if notes.counted is None else notes.counted
        _write(cluster, opener, msgspec.structs.replace(old, leaders=leaders, counted=counted))


def _await_end(cluster: Cluster) -> None:
    deadline = time.monotonic() + _MARKERS_SECONDS
    while cluster.hides_its_end():
        if time.monotonic() > deadline:
            raise Unavailable(
                f"an open transaction hides the end of ledger topic {cluster.place.ledger_topic!r}"
            )
        time.sleep(_MARKERS_POLL_SECONDS)


def _write(
    cluster: Cluster,
    opener: Transaction,
    registered: PipelineRecord,
    beside: Sequence[Message] = (),
) -> None:
    """The pipeline's record, and what belongs to it, in one transaction."""
    place = cluster.place
    opener.begin()
    record = Message(encode(registered), place.words.pipeline_key())
    opener.send(place.ledger_topic, [record, *beside])
    opener.commit()


def same_target(old: PipelineRecord, target: str, name: str) -> None:
    """Refuse to go on in another place than where the pipeline has written so far.

    Raises:
        TableMismatch: naming both.
    """
    if old.target and old.target != target:
        raise TableMismatch(
            f"the destination is {target!r}, and pipeline {name!r} has written to {old.target!r}:"
            " the new one would begin where the old one ends",
            way_out="give the pipeline a new name to begin anew; if this is meant, `oncely"
            " offsets reset FILE --shift-by 0 --execute` says so",
        )


def same_outputs(old: PipelineRecord, now: Mapping[str, str | None], name: str) -> None:
    """Refuse output topics that were deleted, and those that were made again since.

    Args:
        old: what the ledger says.
        now: the topics' ids; None for one that is not there.
        name: the pipeline's.

    Raises:
        TableMismatch: naming the topic.
    """
    for topic, id_ in sorted(now.items()):
        was_there = topic in old.outputs or topic == old.target
        if (id_ is None and was_there) or (id_ is not None and old.outputs.get(topic, id_) != id_):
            again = "" if id_ is None else " and made again"
            raise TableMismatch(
                f"{topic!r} was deleted{again} since pipeline {name!r} wrote to it: what was"
                " written there is gone, and the pipeline would go on in the middle",
                way_out="restore the topic; or give the pipeline a new name, and a new place to"
                " write to, to begin anew; into a topic of records `oncely offsets reset` says"
                " where to begin, and makes the topic",
            )


def _flat(
    registered: PipelineRecord, found: Mapping[TopicPartition, StoredPosition]
) -> dict[TopicPartition, Position]:
    return {tp: entry.position for tp, entry in found.items()} | from_tree(registered.pending)


def _names(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    names: dict[str, list[int]] = {}
    for topic, number in sorted(set(partitions)):
        names.setdefault(topic, []).append(number)
    return names
