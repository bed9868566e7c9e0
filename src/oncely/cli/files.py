"""``oncely files list|paths|read|verify|compact|vacuum``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.errors import WrongInput
from oncely.kinds.files.compact import compact
from oncely.kinds.files.table import Allowed, addresses, listing, rows, table_of
from oncely.kinds.files.vacuum import vacuum
from oncely.kinds.files.verify import verify
from oncely.reject_summary import json_escaped
from oncely.wording import counted, plural

if TYPE_CHECKING:
    import pyarrow as pa

_MOST = 100  # number of problems that are printed


def list_files(file: Path, where: Sequence[str], as_json: bool) -> None:
    """Print the files of the table."""
    found = listing(table_of(opened(file)), chosen(where))
    if as_json:
        screen.show_json(found.as_json())
        return
    # No table: a wrapped path could not be copied.
    for one in found.files:
        screen.out.print(f"{one.rows:>12,} {one.bytes:>15,}  {one.path}")
    of = "" if len(found.files) == found.total else f" of {found.total:,}"
    many = f"{len(found.files):,}{of} files" if of else plural(found.total, "file")
    screen.out.print(f"{many}, {counted(row=found.rows, byte=found.bytes)}")


def list_paths(file: Path, where: Sequence[str], *, plain: bool) -> None:
    """Print the address of each file of the table, one a line.

    Addresses are not redacted: a reader must be able to open them.
    """
    for one in addresses(table_of(opened(file)), chosen(where)):
        line = one["path"] if plain else json.dumps(one)
        sys.stdout.buffer.write(f"{line}\n".encode())
    sys.stdout.flush()


def read_files(
    file: Path,
    where: Sequence[str],
    columns: Sequence[str] | None,
    limit: int | None,
    out: Path | None,
    rounding: Allowed,
    as_json: bool,
) -> None:
    """Print rows, or write them to a Parquet file."""
    found = table_of(opened(file))
    schema, parts = rows(found, where=chosen(where), columns=columns, rounding=rounding)
    parts = _limited(parts, limit)
    if out is not None:
        count = _write(out, schema, parts)
        if as_json:
            screen.show_json({"rows": count, "out": str(out)})
        else:
            screen.out.print(f"{plural(count, 'row')} in {out}")
        return
    # Rows are the user's data: values in them are not redacted.
    encode = msgspec.json.Encoder().encode

    def encoded(value: Any) -> bytes:
        return json_escaped(encode(value).decode()).encode()

    lines = (encoded(_plain(row)) for part in parts for row in part.to_pylist())
    if as_json:
        columns_ = encoded({field.name: str(field.type) for field in schema})
        sys.stdout.buffer.write(b'{"columns":%b,"rows":[%b]}\n' % (columns_, b",".join(lines)))
    else:
        for line in lines:
            sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def verify_files(file: Path, as_json: bool) -> int:
    """Read and compare every file; returns the exit code."""
    with _bar("files checked") as progress:
        found = verify(table_of(opened(file)), progress)
    if as_json:
        screen.show_json(found.as_json())
    else:
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
    return 1 if found.problems else 0


def compact_files(file: Path, *, dry_run: bool, as_json: bool) -> None:
    """Rewrite small files."""
    with _bar("files rewritten") as progress:
        done = compact(table_of(opened(file)), dry_run=dry_run, progress=progress)
    if as_json:
        screen.show_json(done.as_json())
        return
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


def vacuum_files(file: Path, *, dry_run: bool, as_json: bool) -> None:
    """Remove orphans."""
    done = vacuum(table_of(opened(file)), dry_run=dry_run)
    if as_json:
        screen.show_json(done.as_json())
        return
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


def chosen(where: Sequence[str], option: str = "--where") -> dict[str, str | None]:
    """``NAME=VALUE`` as a mapping; ``NAME`` alone means no value.

    Raises:
        WrongInput: a name is repeated or empty.
    """
    found: dict[str, str | None] = {}
    for one in where:
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
