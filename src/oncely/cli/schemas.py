"""``oncely files schema show`` and ``oncely files schema reset``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial

from oncely.cli import screen, verbs
from oncely.cli.files import chosen
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.tables import LEFT, RIGHT, show
from oncely.decode.avro_names import arrow_schema_of
from oncely.decode.schema import type_name
from oncely.errors import WrongInput
from oncely.files.schema_reset import SchemaReset, reset_schema
from oncely.files.table import Table, table_of
from oncely.lake.records import Scope
from oncely.wording import plural


def show_schemas(asked: verbs.FilesSchemaShow) -> Result:
    """Print the columns of one scope, or of all scopes."""
    table, scope = table_of(opened(asked.file)), asked.scope
    contents = table.look()
    counts = Counter(one.scope for one in contents.files.values())
    wanted = contents.schemas if not scope else [_scope(table, scope)]
    found = {one: contents.schemas[one] for one in wanted if one in contents.schemas}
    told = (
        {"scope": list(of), "files": counts[of], "id": one.id, "avro": json.loads(one.avro)}
        for of, one in found.items()
    )
    rows = (
        (_shown(one), counts[one], field.name, type_name(field.type))
        for one, schema in found.items()
        for field in arrow_schema_of(schema.avro)
    )
    columns = [("scope", LEFT), ("files", RIGHT), ("column", LEFT), ("type", LEFT)]
    return Result(lambda: {"schemas": list(told)}, partial(show, columns, rows))


def reset_scope(asked: verbs.FilesSchemaReset) -> Result:
    """Print the effect of a reset, or execute it."""
    pipeline = opened(asked.file)
    scope = _scope(table_of(pipeline), asked.scope or ())
    done = reset_schema(pipeline, scope, execute=asked.execute)
    return Result(done.as_json, partial(_reset, done))


def _reset(done: SchemaReset) -> None:
    changes = [(name, was, now or "forgotten") for name, was, now in done.changes]
    show([("column", LEFT), ("was", LEFT), ("is now", LEFT)], changes)
    screen.out.print(
        f"\nthe scope has {plural(done.files, 'file')}; columns with values in these rows are kept"
    )
    if done.epoch is None:
        screen.out.print("a dry run: nothing was written. Add --execute to execute it")
    else:
        screen.out.print(f"reset with epoch {done.epoch}; a running pipeline is fenced")


def _scope(table: Table, given: Sequence[str]) -> Scope:
    """The scope of ``--scope NAME=VALUE``.

    Raises:
        WrongInput: other columns than the table's scopes have.
    """
    names = [level.column for level in table.levels if level.kind == "column"]
    values = chosen(given, "--scope")
    if not set(values) <= set(names) or (values and set(values) != set(names)):
        raise WrongInput(
            f"--scope: it names {', '.join(values)}, and scopes have {', '.join(names) or 'none'}",
            way_out="write --scope NAME=VALUE once for each of them, values as `oncely files"
            " schema show` shows them; NAME alone: no value",
        )
    return tuple(values[name] for name in names) if values else ()


def _shown(scope: Scope) -> str:
    return json.dumps(list(scope), ensure_ascii=False)
