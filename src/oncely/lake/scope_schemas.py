"""Schemas by scope: the published schemas, those of tasks, and their compatibility."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from oncely.core.batch import StagedRowsGone
from oncely.decode.avro_names import arrow_schema_of, avro_schema_of, schema_id
from oncely.decode.merging import CAPS, NO_CAPS, CannotMerge, Caps, merge
from oncely.lake.records import Receipt, Scope, ScopeSchema


@dataclass
class ScopeSchemas:
    """The schema to which all files of a scope resolve; kept by the driver.

    Attributes:
        known: schemas, those of staged files among them.
        published: the ids of schemas that are in the schema topic.
    """

    known: dict[Scope, pa.Schema] = field(default_factory=dict)
    published: dict[Scope, str] = field(default_factory=dict)

    def agree(self, receipt: Receipt) -> bool:
        """Merge the schemas of a task.

        Returns:
            False if a schema contradicts a known one: then none is merged, since the task's records
                will be checked again, and a rejected record must not affect the schema.
        """
        found = {id_: arrow_schema_of(avro) for id_, avro in receipt.schemas.items()}
        try:
            self.known |= {
                scope: _merged(self.known.get(scope), found[id_], CAPS)
                for scope, id_ in receipt.grown
            }
        except CannotMerge:
            return False
        return True

    def take(self, schemas: Mapping[Scope, ScopeSchema]) -> None:
        """Merge the present schemas of the schema topic.

        Raises:
            StagedRowsGone: another writer has published a schema that contradicts our files.
        """
        for scope, schema in schemas.items():
            if self.published.get(scope) == schema.id:
                continue
            try:
                self.known[scope] = _merged(arrow_schema_of(schema.avro), self.known.get(scope))
            except CannotMerge as error:
                self.known[scope] = arrow_schema_of(schema.avro)
                raise StagedRowsGone(
                    f"the schema of {scope} was extended meanwhile: {error}; the batch is repeated"
                ) from None
            self.published[scope] = schema.id

    def record(self, scope: Scope) -> ScopeSchema:
        """A scope's schema, for the schema topic."""
        avro = avro_schema_of(self.known[scope])
        return ScopeSchema(schema_id(avro), scope, avro)


def _merged(known: pa.Schema | None, found: pa.Schema | None, caps: Caps = NO_CAPS) -> pa.Schema:
    if known is None or found is None:
        return found if known is None else known
    return merge(known, found, caps)
