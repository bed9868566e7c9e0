"""Checks that a Delta table accepts the rows, and keeps committed data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from oncely.errors import TableMismatch
from oncely.sinks.delta.task import DeltaFormat

_EXPIRY = "delta.setTransactionRetentionDuration"
_RETENTION = "delta.deletedFileRetentionDuration"
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_SPECIAL = ("delta.generationExpression", "delta.identity.", "delta.invariants")


def missing_columns(table: Any, form: DeltaFormat, max_staging_age: float) -> pa.Schema:
    """Columns of the rows that the table lacks.

    Raises:
        TableMismatch: it does not accept the rows, or would not keep committed data.
    """
    found = table.metadata()
    types = {one.name: one.type for one in pa.schema(table.schema().to_arrow())}
    problems = [
        *_settings(found.configuration, form, max_staging_age),
        *_columns(table, form, types),
    ]
    if form.keys and "deletionVectors" in (table.protocol().writer_features or ()):
        problems.append("an upsert into a table with deletion vectors is not supported")
    if tuple(found.partition_columns) != form.partition_by:
        wanted = list(form.partition_by)
        problems.append(f"it is partitioned by {found.partition_columns}, not by {wanted}")
    if problems:
        text = f"the Delta table does not accept the rows: {'; '.join(problems)}"
        raise TableMismatch(text, way_out="change the table or the rows; or another sink.url")
    return pa.schema([one for one in form.schema if one.name not in types])


def _settings(given: Mapping[str, str], form: DeltaFormat, age: float) -> Iterator[str]:
    if _EXPIRY in given:
        yield f"{_EXPIRY} is set: the pipeline's positions would expire"
    kept = re.search(r"(\d+) *(second|minute|hour|day|week)", given.get(_RETENTION, "1 week"))
    if kept is None or int(kept[1]) * _SECONDS[kept[2]] < 2 * age:
        yield f"{_RETENTION} is {given[_RETENTION]}: VACUUM could remove staged files"
    if given.get("delta.columnMapping.mode", "none") != "none":
        yield "column mapping is not supported"
    if any(name.startswith("delta.constraints.") for name in given):
        yield "CHECK constraints are not supported"
    if form.keys and given.get("delta.appendOnly") == "true":
        yield "delta.appendOnly is set, and an upsert replaces rows"


def _columns(table: Any, form: DeltaFormat, types: Mapping[str, pa.DataType]) -> Iterator[str]:
    for one in table.schema().fields:
        special = [key for key in one.metadata if key.startswith(_SPECIAL)]
        if special or not one.nullable:
            yield f"column {one.name!r} is {special[0] if special else 'NOT NULL'}"
    spelled = {name.lower(): name for name in types}
    for one in form.schema:
        there = spelled.get(one.name.lower(), one.name)
        if there != one.name:
            yield f"column {one.name!r} differs from {there!r} in capitals only"
        elif types.get(one.name, one.type) != one.type:
            yield f"column {one.name!r} is {types[one.name]}, and the rows have {one.type}"
