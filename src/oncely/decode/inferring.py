"""A run through some records in their order: schemas grow, rows gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from oncely.decode.base import Rejection
from oncely.decode.gather import Records, Slice, readable
from oncely.decode.growing import Grown, grow
from oncely.decode.merging import Caps
from oncely.decode.pieces import Piece, batch, by_scope, groups, taken
from oncely.decode.plans import Plan, Plans
from oncely.decode.reference import Refused
from oncely.decode.scopes import Codes, Scope, ScopeReader
from oncely.decode.shapes import NOTHING

_FIRST_QUOTA, _MORE = 4, 8
"""How many records of a scope are looked at one by one before the others are tried again, and
how many times as many the next time."""
_CELLS = 4_000_000  # values that exist as Python objects at a time


Judge = Callable[[Mapping[str, Any]], str | None]
"""See :class:`oncely.decode.infer.InferringJson`."""


class Part(NamedTuple):
    """Rows of one scope.

    Attributes:
        scope: whose.
        schema: their columns; what was known of the scope after the last of its records.
        rows: in record order.
        row_record: the index of each row's record, ascending.
    """

    scope: Scope
    schema: pa.Schema
    rows: pa.Table
    row_record: pa.Int64Array


class _Scope:
    """What is known of one scope, and what has come of it.

    Attributes:
        plan: of the schema that is known; None before the first row.
        columns: what is known now; ahead of ``plan`` until :meth:`settle`.
        tried: the stamp of the plan that the slice's pending records were last tried with.
        slow: records that were looked at one by one, and their rows.
    """

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.columns = plan.columns if plan else NOTHING
        self.tried = 0
        self.slow_records: list[int] = []
        self.slow_rows: list[dict[str, Any]] = []

    def settle(self, plans: Plans) -> Plan | None:
        if self.columns is not (self.plan.columns if self.plan else NOTHING):
            self.plan = plans.grown(self.columns, self.plan)
            self.columns = self.plan.columns
        return self.plan


class Run:
    """Records in their order, slice by slice; then parts, rejections, and what is known.

    A record is known by its index among all records.
    """

    def __init__(
        self,
        reader: ScopeReader,
        caps: Caps,
        plans: Plans,
        known: Mapping[Scope, pa.Schema],
        judge: Judge | None = None,
    ) -> None:
        self._reader, self._caps, self._plans, self._known = reader, caps, plans, known
        self._judge = judge
        self._codes: dict[Scope, int] = {}
        self._scopes: list[_Scope] = []
        self._pieces: list[Piece] = []
        self._refused: dict[int, str] = {}
        self._unwritable: dict[int, str] = {}

    def slice(self, part: Slice) -> None:
        """Take the next records.

        Records that fit what is known go fast, and may overtake those that don't; see
        :class:`oncely.decode.infer.InferringJson` for why that is the same. The others are looked
        at one by one, in order within their scope. After a few, what is left is tried again: the
        schema has grown.
        """
        found = self._reader.read(part.values)
        for index, why in found.refused.items():
            self._refused[part.first + index] = why
        for known in self._scopes:
            known.tried = 0
        own = np.array([self._code(scope) for scope in found.scopes] or [0], np.int64)
        codes = np.where(found.codes < 0, -1, own[found.codes])
        pending = np.flatnonzero(codes >= 0)
        quota = _FIRST_QUOTA
        begun = len(self._pieces)
        while len(pending):
            unsure = self._fast(part, codes, pending)
            pending = self._slow(part, codes, unsure, quota, begun)
            quota *= _MORE

    def _code(self, scope: Scope) -> int:
        code = self._codes.setdefault(scope, len(self._scopes))
        if code == len(self._scopes):
            schema = self._known.get(scope)
            self._scopes.append(_Scope(None if schema is None else self._plans.of(schema)))
        return code

    def _fast(self, part: Slice, codes: Codes, pending: Records) -> Records:
        """Decode what fits; the others, ascending."""
        plans: dict[int, Plan] = {}
        used, inverse = np.unique(codes[pending], return_inverse=True)
        stamps = np.zeros(len(used), np.int64)
        for index, code in enumerate(used.tolist()):
            scope = self._scopes[code]
            plan = scope.settle(self._plans)
            if plan is not None and plan.stamp != scope.tried:
                scope.tried = stamps[index] = plan.stamp
                plans[plan.stamp] = plan
        unsure: list[Records] = []
        for stamp, positions in groups(stamps[inverse]):
            at = pending[positions]
            if not stamp:
                unsure.append(at)
                continue
            pieces, left = plans[stamp].decode(part.values, at)
            unsure += left
            self._pieces += [
                Piece(plans[stamp], part.first + records, codes[records], rows)
                for records, rows in pieces
            ]
        return np.sort(np.concatenate([np.empty(0, np.int64), *unsure]))

    def _slow(self, part: Slice, codes: Codes, unsure: Records, quota: int, begun: int) -> Records:
        """Look at some records of each scope, one by one; those that are left, ascending."""
        left: list[int] = []
        back: list[Records] = []
        seen: dict[int, int] = {}
        for index, code in zip(unsure.tolist(), codes[unsure].tolist(), strict=True):
            count = seen.get(code, 0)
            if count >= quota:
                left.append(index)
                continue
            seen[code] = count + 1
            scope = self._scopes[code]
            record = part.first + index
            try:
                grown = grow(scope.columns, part.values[index].as_py(), self._caps)
            except Refused as error:
                self._refused[record] = str(error)
                continue
            if self._judge is not None and grown.columns is not scope.columns:
                why = self._judge(grown.members)
                if why is not None:
                    self._unwritable[record] = why
                    continue
            scope.slow_records.append(record)
            scope.slow_rows.append(grown.row)
            if self._learn(scope, grown):
                back.append(self._take_back(code, record, begun) - part.first)
                seen[code] = quota  # the others of this scope come after what was taken back
        return np.sort(np.concatenate([np.array(left, np.int64), *back]))

    def _learn(self, scope: _Scope, grown: Grown) -> bool:
        """Know what a record leaves behind; whether rows that went fast must be looked at again.

        They must when a member that had no value has become a column: one of them may have an
        empty array there, which is no column's value before, and a value or a conflict after.
        """
        before, scope.columns = scope.columns, grown.columns
        if grown.columns is not before:
            return scope.plan is not None and scope.plan.concerns(before, grown.columns)
        if scope.plan is not None and scope.plan.columns is before:
            scope.plan.learn(grown.members)
        return False

    def _take_back(self, code: int, record: int, begun: int) -> Records:
        """Forget rows of a scope that came after a record; their records, ascending."""
        found: list[Records] = []
        for index in range(begun, len(self._pieces)):
            piece = self._pieces[index]
            again = (piece.codes == code) & (piece.records > record)
            if again.any():
                found.append(piece.records[again])
                self._pieces[index] = taken(piece, np.flatnonzero(~again))
        self._scopes[code].tried = 0
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def rejections(self) -> list[Rejection]:
        """Records that are no rows, ascending."""
        decode = (Rejection(at, "decode", readable(why)) for at, why in self._refused.items())
        write = (Rejection(at, "write", readable(why)) for at, why in self._unwritable.items())
        return sorted([*decode, *write])

    def grown(self) -> dict[Scope, pa.Schema]:
        """The schemas of the scopes that have one."""
        plans = zip(self._codes, (each.settle(self._plans) for each in self._scopes), strict=True)
        return {scope: plan.schema for scope, plan in plans if plan is not None}

    def parts(self) -> list[Part]:
        """The rows, by scope."""
        scopes = list(self._codes)
        plans = [scope.settle(self._plans) for scope in self._scopes]
        stamps = np.array([plan.stamp if plan else 0 for plan in plans], np.int64)
        by_stamp = {plan.stamp: plan for plan in plans if plan}
        rows: dict[int, list[Piece]] = {}
        for piece in self._pieces:
            for stamp, positions in groups(stamps[piece.codes]):
                rows.setdefault(stamp, []).append(taken(piece, positions))
        slow: dict[int, list[int]] = {}
        for code, scope in enumerate(self._scopes):
            if scope.slow_rows:
                slow.setdefault(int(stamps[code]), []).append(code)
        for stamp, codes in slow.items():
            rows.setdefault(stamp, []).extend(self._slow_pieces(by_stamp[stamp], codes))
        parts = [
            (code, Part(scopes[code], by_stamp[stamp].schema, table, pa.array(records)))
            for stamp, pieces in rows.items()
            for code, table, records in by_scope(by_stamp[stamp].schema, pieces)
        ]
        return [part for _, part in sorted(parts, key=lambda found: found[0])]

    def _slow_pieces(self, plan: Plan, codes: list[int]) -> Iterator[Piece]:
        rows = [row for code in codes for row in self._scopes[code].slow_rows]
        records = np.array([r for c in codes for r in self._scopes[c].slow_records], np.int64)
        counts = [len(self._scopes[code].slow_rows) for code in codes]
        of = np.repeat(np.array(codes, np.int64), counts)
        step = max(1, _CELLS // max(1, len(plan.schema)))
        for first in range(0, len(rows), step):
            some = slice(first, first + step)
            yield Piece(plan, records[some], of[some], batch(plan.schema, rows[some]))
