"""What a destination knows of its source: positions, and records that became dead letters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from oncely.audit.delta_snapshot import snapshot_of
from oncely.audit.evidence import Span, Stated, skipped
from oncely.audit.files import open_files
from oncely.audit.sql import open_ledger
from oncely.audit.stored.log import Topics
from oncely.audit.topic_snapshot import take
from oncely.clients.sql.dialects import dialect_for
from oncely.config import (
    DeltaSinkSettings,
    FilesSinkSettings,
    HandlersSinkSettings,
    KafkaSinkSettings,
    PipelineSettings,
    SqlSinkSettings,
)
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """The records that a destination should have.

    Attributes:
        source: cluster and topic ids, as stored in the destination.
        positions: the committed position of each partition.
        started: the first offset of each partition that the pipeline was to read.
        letters: dead letters below the positions.
        skipped: the offsets that a start, or a reset, has put positions behind.
        begins: True if ``started`` is where the pipeline began; False if older entries may be gone.
    """

    source: SourceIdentity
    positions: Mapping[TopicPartition, Position]
    started: Mapping[TopicPartition, Position]
    letters: Collection[tuple[TopicPartition, int]]
    skipped: Mapping[TopicPartition, Sequence[OffsetRange]]
    begins: bool = True


def window_of(settings: PipelineSettings) -> Window:
    """Read the ledger of a pipeline.

    Raises:
        ConfigError: the ledger of this sink can't be read, or is not beside the rows.
        WrongInput: the pipeline never ran, or its ledger may not be read.
        Unavailable: no answer.
    """
    sink = settings.sink
    if settings.offsets.store != "ledger":
        raise ConfigError(
            "offsets.store",
            f"the positions are in {settings.offsets.store}, not beside the rows",
            way_out="compare topic and destination with --left and --right",
        )
    if isinstance(sink, SqlSinkSettings | HandlersSinkSettings):
        dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
        with closing(open_ledger(settings.name, dialect, sink.table)) as tables:
            known = tables.ledger()
            letters = list(tables.rejects_of(_whole(known.started, known.positions)))
            return _window(known, known.started, letters)
    if isinstance(sink, FilesSinkSettings):
        with closing(open_files(settings, sink)) as found:
            waiting = found.rejects(_whole(found.started, found.positions))
            return _window(found, found.started, waiting)
    if isinstance(sink, DeltaSinkSettings):
        table = snapshot_of(settings.name, sink.store)
        return _window(table, table.started, table.letters, begins=table.history.is_whole)
    return _of_topics(settings, sink)


def _of_topics(settings: PipelineSettings, sink: KafkaSinkSettings) -> Window:
    source = settings.source
    with closing(Topics(source.brokers, source.kafka_properties())) as topics:
        taken = take(topics, sink.ledger_topic, sink.rejects, settings.name, lambda ledger: ledger)
    started = taken.started(())
    waiting = taken.waiting(_whole(started, taken.positions))
    return _window(taken, started, waiting, begins=False)


def _window(
    ledger: Stated,
    started: Mapping[TopicPartition, Position],
    letters: Collection[tuple[TopicPartition, int]],
    *,
    begins: bool = True,
) -> Window:
    passed = skipped(ledger.committed)
    return Window(ledger.source, ledger.positions, started, letters, passed, begins)


def _whole(
    started: Mapping[TopicPartition, Position], positions: Mapping[TopicPartition, Position]
) -> list[Span]:
    return [Span(tp, OffsetRange(started[tp], at)) for tp, at in positions.items()]
