"""Schemas by scope: what is published, what tasks have found, and whether that goes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from oncely.core.batch import StagedRowsGone
from oncely.decode.avro_names import arrow_schema_of, avro_schema_of, schema_id
from oncely.decode.merging import NO_CAPS, CannotMerge, Caps, merge
from oncely.decode.scopes import as_of_today
from oncely.lake.records import Receipt, Scope, ScopeSchema


@dataclass
class SchemaRegistry:
    """The schema that all files of a scope resolve to; the driver keeps it.

    Attributes:
        known: schemas, those of staged files among them.
        published: the ids of schemas that the schema topic is known to hold.
    """

    known: dict[Scope, pa.Schema] = field(default_factory=dict)
    published: dict[Scope, str] = field(default_factory=dict)

    def agree(self, receipt: Receipt, caps: Caps) -> bool:
        """Take in the schemas that a task has found.

        Returns:
            False when one of them contradicts what is known: then none is taken, since the task's
            records will be judged again, and what a rejected one has taught must not be known.
        """
        found = {id_: arrow_schema_of(avro) for id_, avro in receipt.schemas.items()}
        try:
            self.known |= {
                scope: _merged(self.known.get(scope), found[id_], caps)
                for scope, id_ in receipt.grown
            }
        except CannotMerge:
            return False
        return True

    def take(self, pages: Mapping[Scope, ScopeSchema]) -> None:
        """Take in what the schema topic says now.

        Raises:
            StagedRowsGone: somebody has published what our files don't go together with.
        """
        for scope, page in pages.items():
            if self.published.get(scope) == page.id:
                continue
            try:
                self.known[scope] = _merged(arrow_schema_of(page.avro), self.known.get(scope))
            except CannotMerge as error:
                self.known[scope] = arrow_schema_of(page.avro)
                raise StagedRowsGone(
                    f"the schema of {scope} was widened meanwhile: {error}; the batch is done again"
                ) from None
            self.published[scope] = page.id

    def as_of_today(self, columns: Sequence[str]) -> None:
        """Let scopes go on whose values stood without their types in earlier versions.

        Their files keep the old scope and its schema; new files have the new one, which begins
        with the same schema.

        Args:
            columns: whose values the scopes are.
        """
        for scope, schema in list(self.known.items()):
            self.known.setdefault(as_of_today(scope, columns, schema), schema)

    def page(self, scope: Scope) -> ScopeSchema:
        """A scope's schema, for the schema topic."""
        avro = avro_schema_of(self.known[scope])
        return ScopeSchema(schema_id(avro), scope, avro)


def _merged(known: pa.Schema | None, found: pa.Schema | None, caps: Caps = NO_CAPS) -> pa.Schema:
    if known is None or found is None:
        return found if known is None else known
    return merge(known, found, caps)
