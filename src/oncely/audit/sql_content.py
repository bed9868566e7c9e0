"""The evidence of a table whose rows do not contain their offsets: its rows as one group.

The digest of the whole table is computed by the database, and compared with the sum of the
history's. Only if they differ are the rows' digests read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from oncely.audit.content import Group, Rows
from oncely.audit.evidence import Committed, OfLedger, Span
from oncely.audit.layout import ENTRIES, parts
from oncely.audit.report import Finding, Proof
from oncely.audit.tables import Ledger, Tables
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.digest import Recipe
from oncely.core.ranges import OffsetRange, Position, TopicPartition

Digests = npt.NDArray[np.uint64]


class TableReader(Protocol):
    """Reads a whole table."""

    def unable(self, recipe: str) -> str:
        """The reason why digests of the recipe can't be computed; empty if they can."""

    def total(self, recipe: str) -> tuple[int, int | None]:
        """The number of rows, and the sum of their digests; None without a recipe."""

    def digests(self, recipe: str) -> Iterator[Digests]:
        """The digest of each row."""


@dataclass
class OfTable(OfLedger):
    """What both forms of evidence of a table have in common."""

    snapshot: Ledger
    tables: Tables

    def __post_init__(self) -> None:
        self.untold, self.claims = self.snapshot.untold, self.snapshot.claims

    @property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first offset of each partition that the pipeline was to read."""
        return self.snapshot.started

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters of these spans."""
        return list(self.tables.rejects_of(spans))

    def close(self) -> None:
        """End the snapshot and the session."""
        self.tables.close()


@dataclass
class SqlContent(OfTable):
    """One snapshot of a table and its ledger; use :func:`oncely.audit.sql.open_evidence`."""

    reader: TableReader
    recipe_of_today: str
    reads: bool = True
    unexpected: Sequence[Finding] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.whole(self.started)
        stated = _stated(self.committed, whole)
        recipe = stated.recipe if stated and stated.recipe else self.recipe_of_today
        unable = self.reader.unable(recipe) if recipe else "the history has no digest of the rows"
        self.recipe_of_all = "" if unable else recipe
        self.proof: Proof = "content" if self.recipe_of_all else "counts"
        self.limits: Sequence[str] = ["rows do not contain the offsets of their records"]
        if unable:
            self.limits = [*self.limits, unable]
            stated = stated and replace(stated, digest=None, recipe="")
        covered = (
            {name for name, _ in Recipe.parse(recipe).columns} if self.recipe_of_all else set()
        )
        if covered and (others := self.tables.columns(self.tables.table) - covered):
            self.limits = [*self.limits, f"no digest covers {', '.join(sorted(others))}"]
        rows, self._digest = self.reader.total(self.recipe_of_all)
        spans, name = self.read(self.started), f"table {self.tables.table}"
        self.groups = [Group(name, spans, rows, stated, others=bool(self.claims))]

    def recipe(self, group: Group) -> str:
        """The history's, or that of today's rows."""
        del group
        return self.recipe_of_all

    def digest_of(self, group: Group) -> int | None:
        """The sum that the database has computed."""
        del group
        return self._digest

    def contents(self, group: Group, recipe: str) -> Iterable[Rows]:
        """The digests of all rows."""
        for digests in self.reader.digests(recipe):
            yield Rows(digests, lambda _: group.name)


def _stated(
    committed: Sequence[Committed], whole: dict[TopicPartition, OffsetRange]
) -> Counts | None:
    """The sum of the history, with its amendments; None if it does not cover all offsets."""
    divided = parts([one for one in committed if one.kind in ENTRIES], whole)
    if any(not one.whole for one in divided):
        return None
    return sum((one.counts for one in committed), NO_RECORDS)
