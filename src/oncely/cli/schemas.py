"""``oncely files schema show`` and ``oncely files schema reset``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from oncely.cli import screen
from oncely.cli.files import chosen
from oncely.cli.opened import opened
from oncely.cli.tables import LEFT, RIGHT, show
from oncely.decode.avro_names import arrow_schema_of
from oncely.decode.schema import type_name
from oncely.errors import WrongInput
from oncely.kinds.file_format import Scope
from oncely.kinds.files.schema_reset import SchemaReset, reset_schema
from oncely.kinds.files.table import Table, table_of
from oncely.wording import plural


def show_schemas(file: Path, scope: Sequence[str], as_json: bool) -> None:
    """Print the columns of one scope, or of all scopes."""
    table = table_of(opened(file))
    contents = table.look()
    counts = Counter(one.scope for one in contents.files.values())
    wanted = contents.schemas if not scope else [_scope(table, scope)]
    found = {one: contents.schemas[one] for one in wanted if one in contents.schemas}
    if as_json:
        shown = [
            {"scope": list(of), "files": counts[of], "id": one.id, "avro": json.loads(one.avro)}
            for of, one in found.items()
        ]
        screen.show_json({"schemas": shown})
        return
    rows = (
        (_shown(one), counts[one], field.name, type_name(field.type))
        for one, schema in found.items()
        for field in arrow_schema_of(schema.avro)
    )
    show([("scope", LEFT), ("files", RIGHT), ("column", LEFT), ("type", LEFT)], rows)


def reset_scope(file: Path, scope: Sequence[str], *, execute: bool, as_json: bool) -> None:
    """Print the effect of a reset, or execute it."""
    pipeline = opened(file)
    done = reset_schema(pipeline, _scope(table_of(pipeline), scope), execute=execute)
    if as_json:
        screen.show_json(done.as_json())
        return
    show([("column", LEFT), ("was", LEFT), ("is now", LEFT)], _changes(done))
    screen.out.print(
        f"\nthe scope has {plural(done.files, 'file')}; columns with values in these rows are kept"
    )
    if done.epoch is None:
        screen.out.print("a dry run: nothing was written. Add --execute to execute it")
    else:
        screen.out.print(f"reset with epoch {done.epoch}; a running pipeline is fenced")


def _changes(done: SchemaReset) -> list[tuple[str, str, str]]:
    return [(name, was, now or "forgotten") for name, was, now in done.changes]


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
