"""JSON records to columns that nobody has named: the rules, and who is asked when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

from oncely.decode.base import Rejection
from oncely.decode.gather import Slice, no_gc, slices
from oncely.decode.inferring import Judge, Part, Run
from oncely.decode.merging import Caps
from oncely.decode.plans import Plans
from oncely.decode.scopes import Scope, ScopeReader

_SECTION_BYTES = 128 * 1024 * 1024
"""Parts are put together at the end of a section; this keeps a column's texts below 2 GiB."""


class Inferred(NamedTuple):
    """The outcome of some records: each is a row of one part, or a rejection.

    Attributes:
        parts: rows by scope, in order of the scopes' first rows. Records of very many bytes make
            several parts of a scope, in the records' order.
        rejections: the bad records, ascending.
        known: the schemas that were known, and what they have grown to.
    """

    parts: list[Part]
    rejections: list[Rejection]
    known: dict[Scope, pa.Schema]


@dataclass(frozen=True)
class InferringJson:
    """Decodes records that are one JSON object each, and finds out their columns.

    What is JSON is said by :class:`oncely.decode.json.JsonDecoder`; so are the types. Records
    have a scope each, the values of ``scope_columns``, and every scope has a schema of its own:

    - A member's type is what its first value says: a text is a STRING (also one that looks like
      a date), true is a BOOLEAN, a number without point and exponent a BIGINT, any other number
      a DOUBLE, an object a STRUCT, an array an ARRAY.
    - Null, an empty array, an object without anything else in it say nothing: such a member is
      no column until another record has a value there, and this record's row has null there.
    - A BIGINT that meets a number with a point becomes a DOUBLE, from that record on, unless it
      has held a number beyond 2^53: not all of these equal a DOUBLE, and none is ever rounded.
      For the same reason a DOUBLE takes a whole number only if that equals a DOUBLE.
    - A whole number beyond 64 bits is refused unless its column is a DOUBLE by then.
    - A value of another type than its column's is a conflict: the record is refused, and nothing
      is learned from it. So the first record counts, not the majority.
    - Nor is anything learned from a record that ``judge`` refuses: it will be no row either.
    - A record is a row of the schema that it leaves behind. When the schema would be larger than
      the caps, the record is refused. So is an object without any value before a column is known.

    How records are cut into calls makes no difference, but for how far a part's schema has grown.
    That is what makes it fast: a record that fits the schema that is known *now* may be decoded
    before an earlier one that doesn't. It fits every schema that grows from it, its row is the
    same when widened, and it adds nothing that the earlier one could meet.

    Attributes:
        scope_columns: names of members; with none, all records have the scope ``()``.
        caps: what a schema may grow to.
        judge: says why a record can't be written although it can be decoded, or None. It is asked
            about records that would make a schema grow, and no others.
    """

    scope_columns: tuple[str, ...] = ()
    caps: Caps = field(default_factory=Caps)
    judge: Judge | None = None

    def infer(self, values: pa.ChunkedArray, known: Mapping[Scope, pa.Schema]) -> Inferred:
        """Decode every record: a row or a rejection.

        Args:
            values: binary or large_binary, the records.
            known: schemas by scope, of types that :func:`oncely.decode.avro_form.storable` gives.
        """
        parts: list[Part] = []
        rejections: list[Rejection] = []
        book = dict(known)
        self._plans.forget()
        with no_gc():
            for section in _sections(values):
                run = Run(self._scopes, self.caps, self._plans, book, self.judge)
                for part in section:
                    run.slice(part)
                parts += run.parts()
                rejections += run.rejections()
                book.update(run.grown())
        return Inferred(parts, rejections, book)

    @cached_property
    def _scopes(self) -> ScopeReader:
        return ScopeReader(self.scope_columns)

    @cached_property
    def _plans(self) -> Plans:
        return Plans()

    def __getstate__(self) -> dict[str, Any]:
        # msgspec's types are made at run time and can't be pickled; each process makes its own.
        return {name: getattr(self, name) for name in ("scope_columns", "caps", "judge")}


def _sections(values: pa.ChunkedArray) -> Iterator[list[Slice]]:
    section: list[Slice] = []
    size = 0
    for part in slices(values):
        if section and size + part.values.nbytes > _SECTION_BYTES:
            yield section
            section, size = [], 0
        section.append(part)
        size += part.values.nbytes
    yield section
