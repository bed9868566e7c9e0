"""A table in PostgreSQL: the server groups rows by cell and computes their digests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.audit.evidence import Cell, Holder, Keys, Tally
from oncely.audit.stored.sql_ledger import REJECTS
from oncely.audit.tables import OF_REJECTS, OF_ROWS, OFFSET, Tables, present
from oncely.audit.tally import MODULUS, by_partition
from oncely.core.digest import Recipe
from oncely.core.ranges import TopicPartition, grouped
from oncely.errors import WrongInput
from oncely.stores.sql.connection import plain
from oncely.stores.sql.postgres_types import COMPUTES, SET_TEXTS, NotComputable, row_digest

_AT_ONCE = 100_000  # rows
_WORKERS = 4  # parallel workers that the server may use for one statement
_BEGIN = (
    "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    SET_TEXTS,
    f"SET LOCAL max_parallel_workers_per_gather = {_WORKERS}",
    "SET LOCAL parallel_tuple_cost = 0",
    # A policy that hides rows from this role raises an error.
    "SET LOCAL row_security = off",
)


def begin(tables: Tables) -> PostgresReader:
    """Begin the snapshot.

    Raises:
        WrongInput: a table is missing, or this user may not read it.
    """
    for statement in _BEGIN:
        tables.session.execute(statement)
    tables.require_tables()
    names = [plain(tables.name(one)) for one in tables.all]
    refused = tables.session.query(
        "SELECT name FROM unnest(%s::text[]) AS t (name)"
        " WHERE NOT has_table_privilege(to_regclass(name), 'SELECT')",
        (names,),
    )
    if refused:
        shown = ", ".join(name for (name,) in refused)
        raise WrongInput(
            f"this user may not read {shown}",
            way_out=f"GRANT SELECT ON {shown} TO the user in sink.url; an audit needs nothing else",
        )
    return PostgresReader(tables)


@dataclass
class PostgresReader:
    """Statements that read the table."""

    tables: Tables

    def unable(self, recipe: str) -> str:
        """The reason why digests of the recipe can't be computed; empty if they can."""
        return self._digest(recipe)[1]

    def tallies(self, cells: Sequence[Cell]) -> tuple[list[Tally], bool]:
        """One tally for each cell; true if there are no other rows."""
        if not cells:
            return [], False
        found, total = [Tally() for _ in cells], 0
        for at, (recipe, numbers) in enumerate(_by_recipe(cells)):
            digest, _ = self._digest(recipe)
            some = [cells[number] for number in numbers]
            for number, count, offsets, content in self._sums(
                self.tables.rows, OF_ROWS, some, digest or "NULL::bigint"
            ):
                total += count if at == 0 else 0
                if number is not None:
                    found[numbers[number]] = Tally(count, 0, offsets, content)
        known = sum(one.rows for one in found) == total
        letters = f"{self.tables.name(REJECTS)} WHERE pipeline = %s"
        for number, count, offsets, _ in self._sums(
            letters, OF_REJECTS, cells, "NULL::bigint", self.tables.pipeline
        ):
            if number is not None:
                old = found[number]
                both = (old.offsets + offsets) % MODULUS
                found[number] = Tally(old.rows, count, both, old.digest)
        return found, known

    def rows(self, cells: Sequence[Cell]) -> Iterable[pa.RecordBatch]:
        """Rows by offset, of these cells."""
        for recipe, numbers in _by_recipe(cells):
            digest, _ = self._digest(recipe)
            given = _given(OF_ROWS, digest or "NULL::bigint")
            cut, bounds = _cuts([cells[number] for number in numbers])
            lines = self.tables.session.query(
                f"WITH {cut} SELECT t, p, at, COUNT(*), SUM(content)::text"
                f" FROM (SELECT {given} FROM {self.tables.rows}) AS given"
                " JOIN cut ON cut.topic = given.t AND cut.number = given.p"
                " WHERE cut.inside[width_bucket(at, cut.cuts)] GROUP BY 1, 2, 3",
                bounds,
            )
            yield present([(*one, _unsigned(content)) for *one, content in lines])

    def total(self, recipe: str) -> tuple[int, int | None]:
        """The number of rows, and the sum of their digests; None without a recipe."""
        digest = self._digest(recipe)[0] or "NULL::bigint"
        ((count, content),) = self.tables.session.query(
            f"SELECT COUNT(*), SUM({digest})::text FROM {self.tables.rows}", ()
        )
        return int(count), (_unsigned(content) or 0) if recipe else None

    def digests(self, recipe: str) -> Iterator[npt.NDArray[np.uint64]]:
        """The digest of each row."""
        digest, _ = self._digest(recipe)
        run = self.tables.session
        table = self.tables.rows
        run.execute(f"DECLARE rows NO SCROLL CURSOR FOR SELECT {digest} FROM {table}", ())
        while some := run.query(f"FETCH {_AT_ONCE} FROM rows"):
            yield np.array(some, dtype=np.int64).reshape(-1).view(np.uint64)
        run.execute("CLOSE rows")

    def holders(self, keys: Keys) -> Iterator[Holder]:
        """The rows that have one of some keys; the server compares versions."""
        digest, _ = self._digest(keys.recipe)
        given, newer, asked = _given(OF_ROWS, digest), "FALSE", ""
        params: list[object] = [keys.digest.view(np.int64).tolist()]
        if keys.version is not None and keys.versions is not None:
            given += f", {self.tables.dialect.quote(keys.version)} AS version"
            newer = "COALESCE(given.version > asked.version, FALSE)"
            asked = f", %s::{self._types[keys.version]}[]"
            params.append(keys.versions.to_pylist())
        names = "content, version" if asked else "content"
        for content, *rest in self.tables.session.query(
            f"SELECT content, t, p, at, {newer}"
            f" FROM (SELECT {given} FROM {self.tables.rows}) AS given"
            f" JOIN unnest(%s::bigint[]{asked}) AS asked ({names}) USING (content)",
            params,
        ):
            yield Holder(content % MODULUS, *rest)

    def _sums(
        self,
        relation: str,
        names: tuple[str, str, str],
        cells: Sequence[Cell],
        digest: str,
        *params: object,
    ) -> Iterator[tuple[int | None, int, int, int | None]]:
        """By cell: its number, the number of rows, the sum of their offsets' digests, and that of
        their own.

        The number is None for rows in no cell.
        """
        bounds = _bounds(cells)
        cut, values = _cuts(cells)
        given = _given(names, digest)
        answer = self.tables.session.query(
            f"WITH {cut}, line AS (SELECT cut.first + width_bucket(at, cut.cuts) AS bucket,"
            f" content, at FROM (SELECT {given} FROM {relation}) AS given"
            " LEFT JOIN cut ON cut.topic = given.t AND cut.number = given.p"
            # A fence: from the column's statistics the planner would expect a group for each row,
            # and neither group them in parallel nor hash them. A constant permits parallel plans.
            " OFFSET '0'::bigint)"
            " SELECT bucket, COUNT(*), SUM(hashint8extended(1, at))::text, SUM(content)::text"
            " FROM line GROUP BY 1",
            (*values, *params),
        )
        numbers = {of.first + at: number for of in bounds for at, number in of.cells.items()}
        for bucket, count, offsets, content in answer:
            own = None if bucket is None else numbers.get(bucket)
            yield own, int(count), _unsigned(offsets) or 0, _unsigned(content)

    def _digest(self, recipe: str) -> tuple[str, str]:
        """The expression of a row's digest, or the reason why there is none."""
        if not recipe:
            return "", ""
        if not self._same_functions:
            return "", "the server's encoding is not UTF-8: it computes other digests"
        try:
            known = Recipe.parse(recipe)
            return row_digest(known, self._types, self.tables.dialect.quote, OFFSET), ""
        except (ValueError, NotComputable) as error:
            return "", f"the digests of the rows can't be recomputed: {error}"

    @cached_property
    def _same_functions(self) -> bool:
        return bool(self.tables.session.query(COMPUTES)[0][0])

    @cached_property
    def _types(self) -> Mapping[str, str]:
        columns = self.tables.dialect.columns(self.tables.session, self.tables.table)
        return {one.name: one.type for one in columns}


def _given(names: tuple[str, str, str], digest: str) -> str:
    """Topic, partition, offset and digest of a row."""
    topic, partition, offset = names
    return f"{topic} AS t, {partition} AS p, {offset} AS at, {digest} AS content"


def _unsigned(text: str | None) -> int | None:
    return None if text is None else int(text) % MODULUS


def _by_recipe(cells: Sequence[Cell]) -> list[tuple[str, list[int]]]:
    """The numbers of cells by recipe; those without one are added to another."""
    found = grouped((cell.recipe, number) for number, cell in enumerate(cells))
    if len(found) > 1 and "" in found:
        without = found.pop("")
        found[next(iter(found))] += without
    return list(found.items())


@dataclass(frozen=True)
class _Bounds:
    """The cells of one partition for ``width_bucket``.

    Attributes:
        first: a number that makes the buckets of all partitions distinct.
        cuts: ascending offsets at which cells begin and end.
        cells: by bucket, the number of its cell; other buckets are between cells.
    """

    partition: TopicPartition
    first: int
    cuts: list[int]
    cells: Mapping[int, int]


def _bounds(cells: Sequence[Cell]) -> list[_Bounds]:
    found, first = [], 0
    for tp, (numbers, starts, ends) in sorted(by_partition(cells).items()):
        cuts = np.unique(np.concatenate([starts, ends]))
        buckets = np.searchsorted(cuts, starts, side="right")
        own = {int(b): int(n) for b, n in zip(buckets, numbers, strict=True)}
        found.append(_Bounds(tp, first, cuts.tolist(), own))
        first += len(cuts) + 1
    return found


def _cuts(cells: Sequence[Cell]) -> tuple[str, list[object]]:
    """A WITH query of the cells: by partition the cuts, and whether each bucket is a cell."""
    bounds = _bounds(cells)
    one = "(%s::text, %s::bigint, %s::bigint, %s::bigint[], %s::boolean[])"
    values: list[object] = []
    for of in bounds:
        inside = [bucket + 1 in of.cells for bucket in range(len(of.cuts))]
        values += [*of.partition, of.first, of.cuts, inside]
    known = ", ".join([one] * len(bounds))
    return f"cut (topic, number, first, cuts, inside) AS (VALUES {known})", values
