"""A kind of destination as a value: what a pipeline asks, instead of which kind it has.

A kind is found by its name among the entry points ``oncely.kinds``; its modules are imported when
they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from oncely.extras import KINDS, plugin, plugins

if TYPE_CHECKING:
    from oncely.config import PipelineSettings
    from oncely.config.sink import SinkSettings
    from oncely.errors import OncelyError
    from oncely.kafka.source import KafkaSource
    from oncely.kinds.destination import Destination
    from oncely.kinds.trial import Trial
    from oncely.stores.delta import DeltaConnect
    from oncely.stores.objects.store import Connect as FilesConnect
    from oncely.stores.sql.connection import Connect
    from oncely.stores.topic.cluster import Connect as KafkaConnect


class Parts(Protocol):
    """The parts of a pipeline of which a destination is made."""

    @property
    def settings(self) -> PipelineSettings:
        """The pipeline file."""

    @property
    def source(self) -> KafkaSource:
        """The topics."""

    @property
    def connect(self) -> Connect | None:
        """Opens database sessions."""

    @property
    def kafka_connect(self) -> KafkaConnect | None:
        """Creates clients of Kafka."""

    @property
    def files_connect(self) -> FilesConnect | None:
        """Opens roots of files."""

    @property
    def delta_connect(self) -> DeltaConnect | None:
        """Loads and commits to Delta tables."""

    @property
    def handlers(self) -> Mapping[str, Any] | None:
        """The functions of a worker, by topic."""

    @property
    def threads(self) -> Mapping[str, int]:
        """The number of threads of each topic's partitions, for topics with several."""


@dataclass(frozen=True)
class Texts:
    """What a kind guarantees, in the words of ``oncely plan``.

    Attributes:
        by_driver: how a publication of the driver takes effect.
        ends: the limits of exactly once, a sentence each.
        by_task: how the commit of a task takes effect, where tasks commit.
        why_driver: the reason why the driver publishes what row transforms make, where it does.
        refused: the end of "a row that …", for a row of a Spark transform.
        untransacted: the limits of a weaker delivery.
    """

    by_driver: str
    ends: tuple[str, ...]
    by_task: str = ""
    why_driver: str = ""
    refused: str = "can't be written"
    untransacted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposed:
    """What ``oncely init`` proposes for a kind.

    Attributes:
        prefixes: the beginnings of ``--to`` that name it; of those of all kinds the longest counts.
        sink: keys of ``[sink]``, by ``--to``, the topic, and the name of a table; None: it is not
            one that ``--to`` may name.
        fits: False for the name of a column that it can't have.
        partition_by: the columns of that key, by the types of all columns.
    """

    prefixes: tuple[str, ...]
    sink: Callable[[str, str, str], dict[str, Any] | None]
    fits: Callable[[str], bool] = lambda _: True
    partition_by: Callable[[Mapping[str, str]], list[str]] = lambda _: []


@dataclass(frozen=True)
class Kind:
    """A kind of destination.

    Attributes:
        name: the value of ``sink.kind``.
        rank: its place among the kinds, where all are listed; the lowest is the first.
        settings: ``[sink]`` of this kind.
        destination: makes the destination of a pipeline.
        require: refuses ``[sink]`` if a package is not installed; asks no server.
        dead_letters: the place of dead letters by ``[sink]``, for texts.
        texts: what it guarantees.
        again: what records are that a weaker delivery writes again, by ``[sink]``; a sentence.
        unchecked: what ``plan`` has not checked. It takes the parts of the pipeline, and whether
            functions of the user run beside the commits.
        commits: ``chunks``: tasks commit what row transforms make, each in transactions of its own;
            ``ranges``: they stage it, and the driver publishes it.
        ledger: the server of the ledger: that of the rows, or the cluster of the source, where the
            positions are also those of the consumer group.
        ledger_key: the key of the pipeline file for that server, by ``[sink]``.
        silent_after: errors of the first look after which the server is not asked again, because
            each question would take its time limit.
        group_is_ledger: workers must be members of the group in which the positions are.
        spans: the run makes the spans of its commits; False: the sink does.
        has_json: its columns may have a type for JSON.
        replays_beside_store: a replay keeps its position with the rows, wherever the pipeline's
            positions are.
        calls_handlers: functions of a :class:`oncely.Worker` write, not this package.
        listed: the files that a topic lists as its table, and the schemas of their scopes
            (:class:`oncely.kinds.files.manifest.Contents`); None: no topic lists any.
        trial: how ``oncely semantics`` kills its pipelines; None: it does not.
        proposed: what ``oncely init`` proposes; None: ``--to`` can't name it.
    """

    name: str
    rank: int
    settings: type[SinkSettings]
    destination: Callable[[Parts], Destination]
    require: Callable[[Any], None]
    dead_letters: Callable[[Any], str]
    texts: Texts
    again: Callable[[Any], str] = lambda _: ""
    unchecked: Callable[[Parts, bool], str] = lambda _, __: ""
    commits: Literal["chunks", "ranges"] = "chunks"
    ledger: Literal["destination", "source"] = "destination"
    ledger_key: Callable[[Any], str] = lambda _: "sink.url"
    silent_after: tuple[type[OncelyError], ...] = ()
    group_is_ledger: bool = False
    spans: bool = True
    has_json: bool = False
    replays_beside_store: bool = False
    calls_handlers: bool = False
    listed: Callable[[Parts], Any] | None = None
    trial: Callable[[], Trial] | None = None
    proposed: Proposed | None = None

    @property
    def works(self) -> bool:
        """True if a worker may write to it: a worker commits chunks."""
        return self.commits == "chunks"


def kind_of(name: str) -> Kind:
    """The kind of this name.

    Args:
        name: one that the pipeline file may contain.
    """
    kind: Kind = plugin(KINDS, name)
    return kind


def kinds() -> tuple[Kind, ...]:
    """Every kind that is installed, by rank."""
    return plugins(KINDS)


# -- what several kinds say --------------------------------------------------------------------


BOTH_DELETED = (
    "when the ledger topic and the consumer group are both deleted, no trace of earlier runs "
    "is left: the pipeline begins again"
)


RESTORED = (
    "a database that is restored to an earlier state is restored with its positions: what"
    " came after is read again, as far as the topic still holds it"
)


def again(sink: Any) -> str:
    """What the mode of a table makes of records that are written again."""
    if sink.mode == "upsert":
        return "an upsert by the same keys makes the second writing of a record harmless"
    return (
        'records that are written again are duplicate rows; mode = "upsert" would store them once'
    )


def folder_url(folder: str) -> str | None:
    """The URL of a folder, which may be one; None for a name without a slash."""
    if "://" in folder:
        return folder
    return Path(folder).resolve().as_uri() if "/" in folder or folder.startswith(".") else None


def one_folder(parts: Parts, beside: bool) -> str:
    """That machines share a folder."""
    del beside
    sink: Any = parts.settings.sink
    if not parts.settings.on_cluster or not str(sink.url).startswith("file:"):
        return ""
    return "not checked: sink.url must be one folder that all machines of the cluster share"
