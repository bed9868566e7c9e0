"""Dead letters tried again: what passes now goes to the output, each exactly once.

A letter stays in its topic for ever; the token is the position of replays there. One
transaction holds the records of the letters that pass, new letters for those that fail again,
and the position behind all of them. The position has one transactional id, and so the order is
that of every position in Kafka (docs/decisions/0010): what was read and judged is written by an
instance that was initialised first and then found the position where the judging began. So a
crash before the commit leaves every letter waiting, a crash after it none of them; a commit
whose answer was lost is settled by asking again; and of two replays at once the one that has
initialised last commits, the other one finds the position moved.

A reset voids letters, so what is compared holds the resets too. A reset initialises the id of
replays between the transaction that voids them and the first position that it moves. A replay
that has found no reset thus commits before that, as if it had been there before the reset, or is
fenced.

The pipeline itself may run beside it: it appends letters, and no position of its own is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from oncely.clients.kafka import topics
from oncely.clients.kafka.transaction import Message, Transaction
from oncely.core.batch import Rejection
from oncely.core.claim import PositionMoved
from oncely.core.topics import Position, TopicPartition
from oncely.errors import ConfigError, InvariantViolation, Stopped, check
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.compare_and_set import compare_and_set
from oncely.ledgers.topic.records import OffsetMetadata, PipelineRecord, ReplayRecord, stamp
from oncely.ledgers.topic.records import encode as ledger_value
from oncely.ledgers.topic.takeover import same_target
from oncely.sinks.kafka import letters
from oncely.sinks.kafka.dead_letters import DeadLetters, Reading, ReplayPosition, replaying
from oncely.sinks.kafka.letters import DeadLetter
from oncely.sinks.kafka.messages import encode
from oncely.sinks.kafka.sink import KafkaSink
from oncely.sinks.replaying import Judge, Judged, Tried

_BYTES = 32 << 20  # of letters in one transaction


class Passed(Protocol):
    """What became of records that were tried again."""

    @property
    def topics(self) -> Sequence[str]:
        """That :meth:`messages` are for."""

    @property
    def refused(self) -> Sequence[Rejection]:
        """Records that can't be written either."""

    def messages(self) -> Mapping[str, Sequence[Message]]:
        """By topic; asked for when the transaction has begun, and nothing is in it yet.

        Raises:
            Unavailable: what was made of the records no longer fits; they are tried again.
        """

    def fresh(self) -> None:
        """The broker has them; the commit is next.

        Raises:
            Unavailable: they are too old by now; they are tried again.
        """


class Output(Protocol):
    """Where a replay writes to."""

    @property
    def place(self) -> PipelineTopics:
        """Cluster, pipeline, group and ledger topic."""

    @property
    def rejects_topic(self) -> str:
        """Where the letters are."""

    @property
    def target(self) -> str:
        """As the ledger has it."""

    @property
    def replayer(self) -> str:
        """One for all replays of the pipeline."""

    def tried(self, judged: Judged) -> Passed:
        """Make of the rows what is written.

        Raises:
            Stopped: a row of a Spark transform can't be written.
        """

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True)
class ToTopics:
    """The output of a Kafka sink.

    Attributes:
        sink: for rows of the pipeline's columns, bound.
    """

    sink: KafkaSink

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
        """The topic."""
        return self.sink.form.target

    @property
    def replayer(self) -> str:
        """An id of its own: the pipeline may run beside it."""
        return self.place.words.replayer

    def close(self) -> None:
        """Close the sink's connections."""
        self.sink.close()

    def tried(self, judged: Judged) -> Passed:
        """Encode the rows."""
        chunk = judged.chunk
        refused = chunk.rejections
        if not judged.traceable:  # its rows name no record, and none is left out for a reject
            chunk = replace(chunk, rejections=())
        encoded = encode(chunk, self.sink.form, self._limits)
        if judged.traceable:
            refused = encoded.rejections
        elif encoded.rejections:
            raise Stopped(
                f"a row of the Spark transform can't be written: {encoded.rejections[0].reason}",
                way_out="mend the transform; all of these rejects were left as they are",
            )
        return _Encoded({name: encoded.messages(at) for name, at in encoded.all.items()}, refused)

    def _limits(self, names: Sequence[str]) -> dict[str, int]:
        """``max.message.bytes`` of the topics that are there and may get old records."""
        asker = self.sink.cluster.asker
        there = topics.described(asker, names)
        refuse_compacted(self.sink, there)
        return topics.largest_batch(asker, there)


@dataclass(frozen=True)
class _Encoded:
    by_topic: Mapping[str, Sequence[Message]]
    refused: Sequence[Rejection]

    @property
    def topics(self) -> Sequence[str]:
        return list(self.by_topic)

    def messages(self) -> Mapping[str, Sequence[Message]]:
        return self.by_topic

    def fresh(self) -> None:
        pass


class Replay:
    """One replay, of the letters that a reader of committed records sees when it begins.

    Args:
        output: where records go that pass now.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._cluster = Cluster(replaying(output.place))
        self._letters = DeadLetters(self._cluster, output.rejects_topic)
        self._ends: Mapping[TopicPartition, Position] | None = None
        self._settled = False

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()
        self._output.close()

    def step(self, limit: int, judge: Judge) -> Tried | None:
        """Try up to ``limit`` letters in one transaction; None: no more are left.

        Raises:
            ConfigError: records would go to a compacted topic.
            TableMismatch: the pipeline has written to another topic.
            Stopped: a row of a Spark transform can't be written; nothing was changed.
            Unavailable: the outcome is unknown; ask again.
        """
        if self._ends is None:
            self._ends = self._letters.ends()
        self._settle()
        standing = self._letters.stand(certain=True)
        if standing is None:
            return None
        same_target(_registered(standing), self._output.target, self._output.place.pipeline)
        portion = self._read(standing, self._ends, limit)
        if portion.after == standing.positions:
            return None
        outgoing = self._judged(portion, judge)
        self._settled = False
        try:
            done = self._write(portion, outgoing)
        except PositionMoved:
            done = Tried(0, 0)  # another replay was quicker: these are done
        self._settled = True
        return done

    def _settle(self) -> None:
        """End what an earlier replay may have left open: it hides where that has come."""
        if not self._settled:
            with self._cluster.transaction(self._output.replayer) as before:
                before.init()
            self._settled = True

    def _read(
        self, standing: ReplayPosition, ends: Mapping[TopicPartition, Position], limit: int
    ) -> _Portion:
        found: dict[tuple[TopicPartition, int], DeadLetter] = {}
        size = 0
        reading = Reading(self._cluster.place, standing, ends)
        with closing(reading.letters()) as waiting:
            for one in waiting:
                found[one.origin] = one  # one record has one letter; a copy changes nothing
                size += len(one.reject.key or b"") + len(one.reject.value or b"")
                if len(found) >= limit or size >= _BYTES:
                    break
        ordered = tuple(found[origin] for origin in sorted(found))
        return _Portion(standing, ordered, dict(reading.positions))

    def _judged(self, portion: _Portion, judge: Judge) -> _Outgoing:
        whole = [one for one in portion.letters if one.left_out is None]
        if not whole:
            return _Outgoing(None, portion.letters)
        judged = judge([one.reject for one in whole])
        check(judged.chunk.records == len(whole), "a replayed reject was lost on the way")
        passed = self._output.tried(judged)
        kept = [
            _with_reason(whole[one.record], one)
            for one in sorted(passed.refused, key=lambda one: one.record)
        ]
        rest = [one for one in portion.letters if one.left_out is not None]
        return _Outgoing(passed, (*kept, *rest))

    def _write(self, portion: _Portion, what: _Outgoing) -> Tried:
        """The transaction: initialised first, then the position is asked for."""
        rejects = self._output.rejects_topic
        topics_ = [] if what.passed is None else what.passed.topics
        sizes = topics.largest_batch(self._cluster.asker, [*topics_, rejects])
        place = self._cluster.place

        def compare() -> None:
            now = self._letters.stand(certain=True)
            if now is None or now.compared != portion.standing.compared:
                raise PositionMoved(rejects)

        replayer = self._output.replayer
        with compare_and_set(self._cluster, replayer, compare, sizes.values()) as (writer, _):
            writer.begin()
            messages = {} if what.passed is None else what.passed.messages()
            for topic, own in messages.items():
                writer.send(topic, own)
            limit = sizes[rejects]
            writer.send(rejects, [letters.again(one, limit, place.pipeline) for one in what.kept])
            self._move(writer, portion)
            if what.passed is not None:
                writer.flush(place.transaction_timeout)
                what.passed.fresh()
            writer.commit()
        return Tried(len(portion.letters) - len(what.kept), len(what.kept))

    def _move(self, writer: Transaction, portion: _Portion) -> None:
        """Both copies of the new positions."""
        place, topic_id = self._cluster.place, portion.standing.topic_id
        writer.send(
            place.ledger_topic,
            [
                Message(ledger_value(ReplayRecord(at, topic_id)), place.words.replayed_key(tp))
                for tp, at in portion.after.items()
            ],
        )
        registered = _registered(portion.standing)
        offsets = {
            tp: (
                at,
                stamp(
                    OffsetMetadata(at, registered.epoch, registered.cluster, topic_id),
                    place.pipeline,
                ),
            )
            for tp, at in portion.after.items()
        }
        writer.send_offsets(offsets, self._cluster.group_metadata())


@dataclass(frozen=True)
class _Portion:
    """Letters of one transaction, by their origins; where replays stood, and will stand."""

    standing: ReplayPosition
    letters: tuple[DeadLetter, ...]
    after: Mapping[TopicPartition, Position]


@dataclass(frozen=True)
class _Outgoing:
    """Records that pass, and the letters that stay."""

    passed: Passed | None
    kept: Sequence[DeadLetter]


def refuse_compacted(sink: KafkaSink, names: Mapping[str, object] | Sequence[str]) -> None:
    """Refuse to write old records where the last one of a key is all that stays.

    Raises:
        ConfigError: naming the topic.
    """
    if found := topics.compacted(sink.cluster.asker, names):
        raise ConfigError(
            "sink.topic" if sink.form.topic else "sink.topic_column",
            f"topic {found[0]!r} is compacted: a replayed record is old, written last it would"
            " replace newer records of its key",
            way_out="send the records anew to the source's topic, with what they should say now;"
            " `oncely rejects list --json` has them. Where old records do no harm, set the"
            " topic's cleanup.policy to delete for the replay",
        )


def _registered(standing: ReplayPosition) -> PipelineRecord:
    if standing.view.pipeline is None:
        raise InvariantViolation("letters of a pipeline that is not in the ledger")
    return standing.view.pipeline


def _with_reason(letter: DeadLetter, why: Rejection) -> DeadLetter:
    return replace(letter, reject=replace(letter.reject, stage=why.stage, reason=why.reason))
