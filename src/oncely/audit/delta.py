"""A Delta table as evidence: one version of it, the document that this version names, and the log.

If the rows contain their offsets, they are compared by offset. Otherwise they are compared in
groups: the rows of a commit, and of several commits whose files were rewritten together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from oncely.audit.content import Component, Group, Node, Rows, components, digests_of, recipe_of
from oncely.audit.delta_snapshot import OTHERS, DeltaSnapshot, snapshot_of, total
from oncely.audit.evidence import Committed, Holder, Keys, OfLedger, Span, among, claimed
from oncely.audit.report import Finding, Proof, Undecided
from oncely.audit.tally import Scanned, ScannedRows
from oncely.config import PipelineSettings
from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.digest import Recipe, kind_of, row_digests
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped
from oncely.stores.delta import DeltaConnect, connect

SOURCE = ("kafka_topic", "kafka_partition", "kafka_offset")
_BLAMES = 20
LOG_CUT = "the table's log no longer contains the commits of these offsets"
NOT_READ = "the rows were not read, only counted: --download compares their content"


class _OfTable(OfLedger):
    """What both forms of evidence have in common."""

    snapshot: DeltaSnapshot

    @property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first positions that the log still contains."""
        return self.snapshot.started

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters of these spans."""
        return self.snapshot.inside(spans)


@dataclass
class DeltaGroups(_OfTable):
    """A table whose rows do not contain offsets, as
    :class:`oncely.audit.content.GroupedEvidence`.

    Attributes:
        snapshot: the version.
        reads: the values of all rows are compared.
    """

    snapshot: DeltaSnapshot
    reads: bool = False
    groups: list[Group] = field(default_factory=list, init=False)
    limits: list[str] = field(default_factory=list, init=False)
    unexpected: list[Finding] = field(default_factory=list, init=False)
    _files: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        history = self.snapshot.history
        if not self.reads:
            self.limits.append(NOT_READ)
        if history.foreign:
            self.limits.append(
                f"{len(history.foreign):,} files were added by other writers: not compared"
            )
        nodes = [Node(history.spans(one), one) for one in history.ours]
        for origins, paths in self._by_origins().items():
            spans = tuple(s for one in sorted(origins) for s in history.spans(one))
            nodes.append(Node(spans, paths))
        nodes = [one for one in nodes if one.spans]
        passed = [one for one in self.committed if one.kind == SKIPPED]
        nodes += [Node((one.span,), one) for one in passed]
        found = components(nodes, self.whole(self.started))
        found = [
            one for one in found if not one.nodes or any(n.what not in passed for n in one.nodes)
        ]
        self.groups = [*map(self._of, found), *self._before_the_log()]

    @property
    def proof(self) -> Proof:
        """By values if the rows are read."""
        return "content" if self.reads else "counts"

    def recipe(self, group: Group) -> str:
        """The ledger's recipe, or all columns of the table."""
        if group.stated is not None and group.stated.recipe:
            return group.stated.recipe
        return str(recipe_of(pa.schema(self.snapshot.table.schema().to_arrow())))

    def contents(self, group: Group, recipe: str) -> Iterator[Rows]:
        """The rows of the group's files."""
        columns = Recipe.parse(recipe)
        names = [name for name, _ in columns.columns]
        for path, batch in self.snapshot.batches(names, self._files[group.name]):
            yield digests_of(pa.Table.from_batches([batch]), columns, path)

    def _by_origins(self) -> dict[frozenset[int], list[str]]:
        """The table's files by the commits that they come from."""
        live = self.snapshot.history.live
        origins = {path: live.get(path, frozenset({OTHERS})) for path in self.snapshot.live}
        return grouped((of - {OTHERS}, path) for path, of in origins.items())

    def _before_the_log(self) -> Iterator[Group]:
        """The offsets of commits that the log no longer contains."""
        history = self.snapshot.history
        if spans := self.snapshot.before(self.started):
            first = history.commits[0].version if history.commits else self.snapshot.table.version()
            yield Group(f"before version {first}", tuple(spans), 0, doubt=LOG_CUT)

    def _of(self, found: Component) -> Group:
        versions = sorted(n.what for n in found.nodes if isinstance(n.what, int))
        paths = [path for n in found.nodes if isinstance(n.what, list) for path in n.what]
        history, live = self.snapshot.history, self.snapshot.live
        named = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions}"
        group = Group(
            name=f"{', '.join(f'{s.partition} {s.range}' for s in found.spans)} ({named})",
            spans=found.spans,
            rows=sum(live[path] or 0 for path in paths),
            damage=tuple(self._damage(versions, paths)),
            gone=sum(live[path] or 0 for path in paths if path in self.snapshot.missing),
            stated=self._stated(versions),
            committed=total(history.rows.get(one) for one in versions),
            replayed=sum(history.replayed.get(one, 0) for one in versions),
            others=any(OTHERS in history.live.get(path, ()) for path in paths),
        )
        self._files[group.name] = paths
        return group

    def _stated(self, versions: Sequence[int]) -> Counts | None:
        """The counts of commits, if all of them have any."""
        history = self.snapshot.history
        each = [(history.counts(one), history.spans(one)) for one in versions]
        if not each or any(len(counts) != len(spans) for counts, spans in each):
            return None
        return sum((one for counts, _ in each for one in counts.values()), NO_RECORDS)

    def _damage(self, versions: Sequence[int], paths: Sequence[str]) -> Iterator[str]:
        for blame in self.snapshot.history.blames:
            if blame.origins & set(versions):
                yield blame.text
        for path in sorted(self.snapshot.problems.keys() & set(paths)):
            yield f"{path}: {self.snapshot.problems[path]}"


@dataclass
class DeltaOffsets(ScannedRows, _OfTable):
    """A table whose rows contain their offsets, as :class:`oncely.audit.evidence.Evidence`.

    Attributes:
        snapshot: the version.
    """

    snapshot: DeltaSnapshot
    proof: Proof = "offsets"

    @property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first offsets of which log or totals tell."""
        return self.snapshot.counted

    def __post_init__(self) -> None:
        self.untold = [Undecided(*one, LOG_CUT) for one in self.snapshot.before(self.started)]
        self.claims = self.snapshot.history.claims
        if self._nested and self.snapshot.history.blames:
            reason = f"other writers have changed rows, and no digest covers {self._nested}"
            self.untold.append(Undecided(None, None, reason))

    @cached_property
    def _nested(self) -> str:
        """The columns whose values are not compared."""
        schema = pa.schema(self.snapshot.table.schema().to_arrow())
        return ", ".join(one.name for one in schema if kind_of(one.type) is None)

    @property
    def limits(self) -> Sequence[str]:
        """The damaged files, and the columns whose values are not compared."""
        found = [f"{path}: {problem}" for path, problem in sorted(self.snapshot.problems.items())]
        found += [f"no digest covers {self._nested}"] if self._nested else []
        return found

    @property
    def committed(self) -> Sequence[Committed]:
        """The commits, and an amendment for each partition if dead letters were replayed."""
        own = self.snapshot.committed
        if not self.snapshot.document.replay:
            return own
        whole = {
            tp: OffsetRange(min(self.started[tp], at), at) for tp, at in self.positions.items()
        }
        again = [Committed(Span(*one), "replay", NO_RECORDS) for one in sorted(whole.items())]
        return [*own, *again]

    @property
    def blames(self) -> Sequence[str]:
        """The newest commits of other writers that have changed rows of the pipeline."""
        return [one.text for one in self.snapshot.history.blames[-_BLAMES:]]

    def unable(self, recipe: str) -> str:
        """A column that the table no longer has."""
        names = pa.schema(self.snapshot.table.schema().to_arrow()).names
        lacking = [name for name, _ in Recipe.parse(recipe).columns if name not in names]
        return f"the table has no column {lacking[0]!r} any more" if lacking else ""

    def outside(self, whole: Mapping[TopicPartition, OffsetRange]) -> Iterator[pa.RecordBatch]:
        """Dead letters of other offsets, and rows of these that no other pipeline has committed."""
        letters = (Scanned(tp, np.array([at])) for tp, at in sorted(self.snapshot.letters))
        for one, claims in chain(
            ((one, self.claims) for one in self.scan("")), ((one, ()) for one in letters)
        ):
            range_ = whole.get(one.partition, OffsetRange(0, 0))
            start = range_.start if self.snapshot.history.is_whole else 0
            outside = (one.offsets < start) | (one.offsets >= range_.end)
            yield from one.only(outside & ~claimed(claims, one.partition, one.offsets))

    def holders(self, keys: Keys) -> Iterator[Holder]:
        """The rows that have one of some keys."""
        recipe, version = Recipe.parse(keys.recipe), keys.version
        names = {*SOURCE, *(name for name, _ in recipe.columns), *([version] if version else ())}
        for _, batch in self.snapshot.batches(sorted(names)):
            rows = pa.table(batch)
            versions = rows.column(version) if version else pa.nulls(rows.num_rows)
            yield from among(keys, row_digests(rows, None, recipe), rows.select(SOURCE), versions)

    def letters(self) -> Collection[tuple[TopicPartition, int]]:
        """The dead letters that wait."""
        return self.snapshot.letters

    def scan(self, recipe: str) -> Iterator[Scanned]:
        """The rows of each file, by partition; with digests if the table has all columns."""
        covered = None if not recipe or self.unable(recipe) else Recipe.parse(recipe)
        more = [name for name, _ in covered.columns if name not in SOURCE] if covered else []
        for _, batch in self.snapshot.batches([*SOURCE, *more]):
            rows = pa.table(batch)
            for name in SOURCE:
                rows = rows.filter(rows.column(name).is_valid())
            offsets = rows.column(SOURCE[2]).to_numpy().astype(np.int64)
            digests = None if covered is None else row_digests(rows, offsets, covered)
            topics = rows.column(SOURCE[0]).combine_chunks().dictionary_encode()
            numbers = rows.column(SOURCE[1]).to_numpy()
            for at, topic in enumerate(topics.dictionary.to_pylist()):
                same = topics.indices.to_numpy() == at
                for number in np.unique(numbers[same]).tolist():
                    own = same & (numbers == number)
                    digest = None if digests is None else digests[own]
                    yield Scanned(TopicPartition(topic, int(number)), offsets[own], digest)


def open_delta(
    settings: PipelineSettings,
    *,
    download: bool = False,
    connect: DeltaConnect = connect,
) -> DeltaGroups | DeltaOffsets:
    """A snapshot of a Delta table.

    Raises:
        SourceMismatch: there is no table, or the pipeline never ran.
        Stopped: the ledger's document is gone.
        Unavailable: the store does not answer.
    """
    sink: Any = settings.sink
    taken = snapshot_of(settings.name, sink.store, connect)
    columns = pa.schema(taken.table.schema().to_arrow()).names
    if set(SOURCE) <= set(columns):
        return DeltaOffsets(taken)
    return DeltaGroups(taken, download)
