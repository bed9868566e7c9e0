"""The history of a Delta table: which commits of a pipeline its files come from, and which foreign
commits have taken rows away.

A file's origins are the pipeline's commits whose rows it may contain: the commit that added it, or
the origins of all files that the commit has rewritten which added it. A commit that only rewrites
files (OPTIMIZE) changes no row. Any other commit of another writer that removes files of these
origins is named with the rows that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from oncely.audit.evidence import Span, moment
from oncely.audit.stored.delta_document import DeltaCommit, FileAction
from oncely.clients.sql.claims import Claim
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, Position, TopicPartition, cut

OTHERS = -1
"""Among a file's origins: it may also contain rows of other writers, or of commits that the log no
longer contains."""

_USER = ("userMetadata", "userName", "engineInfo")


@dataclass(frozen=True)
class Blame:
    """A foreign commit that has changed rows of the pipeline.

    Attributes:
        commit: the version.
        origins: the versions whose rows it has changed.
        removed, added: rows in the files that it removed and added; None if the log lacks them.
    """

    commit: DeltaCommit
    origins: frozenset[int]
    removed: int | None
    added: int | None

    @property
    def text(self) -> str:
        """Version, operation, time and user of the commit, and its rows."""
        at = self.commit.at_ms
        when = "" if at is None else f" of {moment(at).isoformat()}"
        given = {name: self.commit.info.get(name) for name in _USER}
        by = "".join(f", {name} {one!r}" for name, one in given.items() if one)
        what = self.commit.operation or "a commit"
        rows = f"{_rows(self.removed)} removed, {_rows(self.added)} added"
        return f"version {self.commit.version}, {what}{when}{by}: {rows}"


@dataclass
class TableHistory:
    """Replays the log of a table for one pipeline.

    Attributes:
        pipeline: the pipeline's name.
        commits: the versions that the log still contains, ascending.
        live: the files of the table now, and the commits that they come from.
        blames: the foreign commits that have changed rows.
        rows: by version, the number of rows that a commit of the pipeline has added; None if the
            log lacks it.
        replayed: by version, the rows that replays of its dead letters have added.
        backfilled: the pipeline has backfilled records: the ledger's totals tell of them.
        foreign: files that other writers have added, and that replaced no file of the pipeline.
        counted: the rows of each file that the log contains, without those that are deleted.
        letters: by file of dead letters, the commits whose records were rejected.
    """

    pipeline: str
    commits: Sequence[DeltaCommit]
    live: dict[str, frozenset[int]] = field(default_factory=dict)
    blames: list[Blame] = field(default_factory=list)
    rows: dict[int, int | None] = field(default_factory=dict)
    replayed: dict[int, int] = field(default_factory=dict)
    backfilled: bool = False
    foreign: set[str] = field(default_factory=set)
    letters: dict[str, frozenset[int]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for commit in self.commits:
            self._take(commit)

    @property
    def is_whole(self) -> bool:
        """True if the log contains the table's first version."""
        return bool(self.commits) and self.commits[0].version == 0

    @property
    def ours(self) -> list[int]:
        """The commits of the pipeline that have moved positions over offsets."""
        return [one.version for one in self.commits if self._spans[one.version]]

    def spans(self, version: int) -> tuple[Span, ...]:
        """The offsets that a commit of the pipeline has moved positions over."""
        return self._spans[version]

    def counts(self, version: int) -> dict[TopicPartition, Counts]:
        """The counts and digests of a commit's ranges."""
        counts = self._commits[version].tree(self.pipeline, "counts")
        return {tp: _counts(told) for tp, told in counts.items()}

    def started(self) -> dict[TopicPartition, Position]:
        """The positions at which partitions began, as far as the log shows."""
        found: dict[TopicPartition, Position] = {}
        for commit in self.commits:
            for tp, at in commit.tree(self.pipeline, "positions").items():
                found.setdefault(tp, self._first_start(commit, tp, at))
        return found

    def _first_start(self, commit: DeltaCommit, tp: TopicPartition, at: Position) -> Position:
        """The start of the range of the first commit that mentions a partition, or its position."""
        starts = [one.range.start for one in self._of(commit) if one.partition == tp]
        return min([at, *starts])

    @cached_property
    def skipped(self) -> dict[TopicPartition, list[OffsetRange]]:
        """The offsets that resets have passed over, and no later one has gone back to."""
        found: dict[TopicPartition, list[OffsetRange]] = {}
        known: dict[TopicPartition, Position] = {}
        for commit in self.commits:
            told = commit.told_by(self.pipeline)
            moved = commit.tree(self.pipeline, "positions")
            for tp, at in moved.items() if told and told.get("kind") == "reset" else ():
                found[tp] = cut(found.get(tp, ()), at)
                if known.get(tp, at) < at:
                    found[tp].append(OffsetRange(known[tp], at))
            known |= moved
        return found

    @property
    def claims(self) -> list[Claim]:
        """What other pipelines have committed, as far as the log shows."""
        return [
            (name, tp, OffsetRange(*one))
            for commit in self.commits
            for name in (app.removeprefix("oncely/") for app in commit.transactions)
            for tp, one in commit.tree(name, "ranges").items()
            if name != self.pipeline
        ]

    # -- parts -----------------------------------------------------------------------------

    @cached_property
    def _commits(self) -> Mapping[int, DeltaCommit]:
        return {one.version: one for one in self.commits}

    @cached_property
    def _spans(self) -> Mapping[int, tuple[Span, ...]]:
        return {one.version: self._of(one) for one in self.commits}

    def _of(self, commit: DeltaCommit) -> tuple[Span, ...]:
        ranges = commit.tree(self.pipeline, "ranges")
        return tuple(Span(tp, OffsetRange(*one)) for tp, one in ranges.items())

    def _take(self, commit: DeltaCommit) -> None:
        told = commit.told_by(self.pipeline)
        others = frozenset({OTHERS})
        removed = {one.path: self.live.pop(one.path, others) for one in commit.removed}
        origins = frozenset[int]().union(*removed.values())
        ours = self._ours(commit, told) if told is not None else frozenset[int]()
        if told is None and not origins:
            origins = others
        for one in commit.added:
            self.live[one.path] = removed.get(one.path) or origins | ours
            if one.rows is not None:
                self.counted[one.path] = one.rows
        self.foreign = {path for path, of in self.live.items() if of == others}
        changes = any(one.changes_data for one in (*commit.removed, *commit.added))
        hit = origins - others
        if told is None and hit and changes:
            self.blames.append(Blame(commit, hit, _rows_of(commit.removed), _rows_of(commit.added)))

    def _ours(self, commit: DeltaCommit, told: Mapping[str, Any]) -> frozenset[int]:
        """The origins of the rows that a commit of the pipeline adds: itself, or, of a replay, the
        commits whose dead letters it has replayed."""
        origins = frozenset({commit.version})
        self.backfilled |= told.get("kind") == "backfill"
        if told.get("kind") == "replay":
            origins = self.letters.get(str(told.get("replayed")), origins)
        replaced = told.get("replaced") or {}  # by a discard
        for path in told.get("rejects") or ():
            self.letters[path] = self.letters.get(replaced.get(path, ""), origins)
        first, added = min(origins), _rows_of(commit.added)
        if told.get("kind") == "replay":
            self.replayed[first] = self.replayed.get(first, 0) + (added or 0)
        before = self.rows.get(first, 0)
        self.rows[first] = None if before is None or added is None else before + added
        return origins


def _counts(told: Mapping[str, Any]) -> Counts:
    """Counts in a commit's metadata; the digest is a text there."""
    records, rows, rejects, filtered = (
        int(told.get(name, 0)) for name in ("records", "rows", "rejects", "filtered")
    )
    digest = int(told["digest"]) if "digest" in told else None
    return Counts(records, rows, rejects, filtered, digest, str(told.get("recipe", "")))


def _rows_of(files: Iterable[FileAction]) -> int | None:
    return total(one.rows for one in files)


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if a number is not known."""
    found = list(numbers)
    return None if None in found else sum(one for one in found if one is not None)


def _rows(number: int | None) -> str:
    return "an unknown number of rows" if number is None else f"{number:,} rows"
