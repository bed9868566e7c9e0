"""``oncely files list|paths|read|verify|compact|vacuum`` and ``oncely files schema show|reset``."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oncely.cli import screen, verbs
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.screen import LEFT, RIGHT, show
from oncely.decode.avro_schema import arrow_schema_of
from oncely.decode.schema import type_name
from oncely.errors import WrongInput
from oncely.kinds.data_file import Scope
from oncely.kinds.files.compact import Compacted, compact
from oncely.kinds.files.maintenance import SchemaReset, Vacuumed, reset_schema, vacuum
from oncely.kinds.files.table import Listing, Table, addresses, listing, rows, table_of
from oncely.kinds.files.verify import Verified, verify
from oncely.wording import counted, json_escaped, plural

if TYPE_CHECKING:
    import pyarrow as pa

_MOST = 100  # number of problems that are printed


def list_files(asked: verbs.FilesList) -> Result:
    """Print the files of the table."""
    found = listing(table_of(opened(asked.file)), chosen(asked.where))
    return Result(found.as_json, partial(_listing, found))


def _listing(found: Listing) -> None:
    # No table: a wrapped path could not be copied.
    for one in found.files:
        screen.out.print(f"{one.rows:>12,} {one.bytes:>15,}  {one.path}")
    of = "" if len(found.files) == found.total else f" of {found.total:,}"
    many = f"{len(found.files):,}{of} files" if of else plural(found.total, "file")
    screen.out.print(f"{many}, {counted(row=found.rows, byte=found.bytes)}")


def list_paths(asked: verbs.FilesPaths) -> None:
    """Print the address of each file of the table, one a line.

    Addresses are not redacted: a reader must be able to open them.
    """
    for one in addresses(table_of(opened(asked.file)), chosen(asked.where)):
        line = one["path"] if asked.plain else json.dumps(one)
        sys.stdout.buffer.write(f"{line}\n".encode())
    sys.stdout.flush()


def read_files(asked: verbs.FilesRead) -> Result | None:
    """Print rows, or write them to a Parquet file."""
    found, where, out = table_of(opened(asked.file)), chosen(asked.where), asked.out
    schema, parts = rows(found, where=where, columns=asked.column, rounding=asked.rounding)
    parts = _limited(parts, asked.limit)
    if out is not None:
        count = _write(out, schema, parts)
        told = f"{plural(count, 'row')} in {out}"
        return Result(lambda: {"rows": count, "out": str(out)}, partial(screen.out.print, told))
    # Rows are the user's data: values in them are not redacted.
    encode = msgspec.json.Encoder().encode

    def encoded(value: Any) -> bytes:
        return json_escaped(encode(value).decode()).encode()

    lines = (encoded(_plain(row)) for part in parts for row in part.to_pylist())
    if asked.as_json:
        columns = encoded({field.name: str(field.type) for field in schema})
        sys.stdout.buffer.write(b'{"columns":%b,"rows":[%b]}\n' % (columns, b",".join(lines)))
    else:
        for line in lines:
            sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()
    return None


def verify_files(asked: verbs.FilesVerify) -> Result:
    """Read and compare every file."""
    with _bar("files checked") as progress:
        found = verify(table_of(opened(asked.file)), progress)
    return Result(found.as_json, partial(_verified, found), 1 if found.problems else 0)


def _verified(found: Verified) -> None:
    for problem in found.problems[:_MOST]:
        screen.out.print(f"{problem.path}: {problem.text}")
    many = plural(len(found.problems), "problem") if found.problems else "no problems"
    screen.out.print(f"{counted(file=found.files, row=found.rows, byte=found.bytes)}: {many}")
    screen.out.print(
        f"not in the manifest: {counted(file=found.unnamed, byte=found.unnamed_bytes)};"
        " no reader reads them"
    )
    if found.other_levels:
        screen.note(
            f"of other partition columns than now: {plural(found.other_levels, 'file')}, whose"
            " rows were not compared with their directories"
        )


def compact_files(asked: verbs.FilesCompact) -> Result:
    """Rewrite small files."""
    with _bar("files rewritten") as progress:
        done = compact(table_of(opened(asked.file)), dry_run=asked.dry_run, progress=progress)
    return Result(done.as_json, partial(_compacted, done, dry_run=asked.dry_run))


def _compacted(done: Compacted, *, dry_run: bool) -> None:
    became = "would become" if dry_run else "became"
    screen.out.print(
        f"{plural(done.inputs, 'file')} with {plural(done.rows, 'row')} {became} {done.outputs:,};"
        f" the table has {done.files:,}"
    )
    if dry_run:
        screen.out.print("a dry run: nothing was written. Omit --dry-run to execute it")
        return
    if done.inputs:
        screen.out.print(f"{plural(done.bytes_before, 'byte')} before, {done.bytes_after:,} after")
    if done.kept:
        screen.note(
            f"kept: {plural(done.kept, 'file')} in which a whole number does not fit the present "
            "type of its column"
        )
    if done.dropped:
        screen.note(f"{plural(done.dropped, 'file')} skipped: another compaction was faster")


def vacuum_files(asked: verbs.FilesVacuum) -> Result:
    """Remove orphans."""
    done = vacuum(table_of(opened(asked.file)), dry_run=asked.dry_run)
    return Result(done.as_json, partial(_vacuumed, done, dry_run=asked.dry_run))


def _vacuumed(done: Vacuumed, *, dry_run: bool) -> None:
    for one in done.orphans if dry_run else ():
        screen.out.print(f"{one.modified:%Y-%m-%d %H:%M:%S} {one.bytes:>15,}  {one.path}")
    would = "would be " if dry_run else ""
    screen.out.print(
        f"{would}removed: {counted(file=len(done.orphans), byte=done.bytes)};"
        f" part of the table: {plural(done.live, 'file')}"
    )
    kept = [
        (done.young, "may still be published"),
        (done.for_readers, "were replaced recently and may be in use by readers"),
        (done.foreign, "do not belong to this table"),
    ]
    for count, why in kept:
        if count:
            screen.note(f"kept: {count:,} that {why}")
    if done.uploads is None:
        screen.note(
            "not looked for: incomplete multipart uploads, which a lifecycle rule of the bucket"
            " removes (AbortIncompleteMultipartUpload)"
        )


def chosen(where: Sequence[str] | None, option: str = "--where") -> dict[str, str | None]:
    """``NAME=VALUE`` as a mapping; ``NAME`` alone means no value.

    Raises:
        WrongInput: a name is repeated or empty.
    """
    found: dict[str, str | None] = {}
    for one in where or ():
        name, equals, value = one.partition("=")
        if not name or name in found:
            raise WrongInput(
                f"{option} {one}: " + ("it is repeated" if name else "it has no column name"),
                way_out=f"write {option} NAME=VALUE, once for each partition column",
            )
        found[name] = value if equals else None
    return found


def _limited(parts: Iterator[pa.Table], limit: int | None) -> Iterator[pa.Table]:
    left = limit
    for part in parts:
        yield part if left is None else part.slice(0, left)
        if left is not None:
            left -= min(left, part.num_rows)
            if not left:
                return


def _plain(value: Any) -> Any:
    """A value for JSON: infinity and NaN are texts, as in Spark's ``to_json``."""
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list():
            return [_plain(inner) for inner in value]
        case float() if not math.isfinite(value):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return value


def _write(out: Path, schema: pa.Schema, parts: Iterator[pa.Table]) -> int:
    """Write all rows, or keep the previous file.

    Raises:
        WrongInput: the file cannot be written.
    """
    import pyarrow.parquet as pq

    count, unfinished = 0, out.with_name(f"{out.name}.unfinished")
    try:
        with pq.ParquetWriter(unfinished, schema) as writer:
            for part in parts:
                writer.write_table(part)
                count += part.num_rows
        unfinished.replace(out)
    except OSError as error:
        raise WrongInput(f"--out {out}: {error}", way_out="specify an existing folder") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return count


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; nothing if stderr is no terminal."""
    from rich.progress import Progress

    with Progress(console=screen.err, disable=not screen.err.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# -- schemas -------------------------------------------------------------------------------


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
