"""The commands. Each does its work elsewhere; here they get their words."""

from __future__ import annotations

import importlib.metadata
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from oncely.cli import logs, screen

app = typer.Typer(
    name="oncely",
    help="Moves records from Kafka into SQL databases and topics so that each takes effect once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_debugging = False


def _debug(value: bool) -> bool:
    global _debugging  # noqa: PLW0603 - main() reads it when a command has failed
    _debugging = value
    logs.configure(debug=value)
    return value


File = Annotated[Path, typer.Argument(help="The pipeline file (TOML).", metavar="FILE")]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_debug, help="Log every step; show tracebacks."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Rounding(StrEnum):
    """Whether a reader may round."""

    refuse = "refuse"
    allow = "allow"


class Until(StrEnum):
    """Where a run may end by itself."""

    LATEST = "latest"


def _version(value: bool) -> None:
    if value:
        print(f"oncely {importlib.metadata.version('oncely')}")
        raise typer.Exit


@app.callback()
def _oncely(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Moves records from Kafka into SQL databases and topics so that each takes effect once."""


@app.command()
def run(
    file: File,
    until: Annotated[
        Until | None,
        typer.Option(help="End when what can be read at the start is committed."),
    ] = None,
    spark_log: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Where Spark's own output goes; - for stderr.", dir_okay=False
        ),
    ] = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Run a pipeline until Ctrl-C, or until what is there is committed.

    Ctrl-C or SIGTERM ends it after the batch in hand; a second one ends it now.

    Exit codes: 0 done (with --until: all of it is committed); 2 wrong input; 3 fenced by a
    newer run (do not restart); 1 the rest.
    """
    from oncely.cli.run import run_file

    code = run_file(file, "latest" if until else None, spark_log)
    raise typer.Exit(code)


@app.command()
def plan(
    file: File,
    spark: Annotated[
        bool | None,
        typer.Option(
            "--spark/--no-spark",
            help="Start Spark to ask the executors and to see a Spark transform's columns;"
            " by default where that is in question.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Check everything and say what a run would do; writes nothing.

    Exit codes: 0 it can run; 2 something has to be changed; 1 a server does not answer.
    """
    from oncely.cli.plan import show_plan

    raise typer.Exit(show_plan(file, spark, as_json))


@app.command()
def status(file: File, as_json: AsJson = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Show position, end and lag of every partition, rejects and epoch."""
    from oncely.cli.status import show_status

    show_status(file, as_json)


offsets = typer.Typer(help="Show or reset positions.", no_args_is_help=True)
app.add_typer(offsets, name="offsets")


@offsets.command("show")
def offsets_show(file: File, as_json: AsJson = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Show first offset, position, end and mirrored offset of every partition."""
    from oncely.cli.offsets import show_offsets

    show_offsets(file, as_json)


@offsets.command("reset")
def offsets_reset(
    file: File,
    to_earliest: Annotated[bool, typer.Option("--to-earliest")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest")] = False,
    to_offset: Annotated[int | None, typer.Option(metavar="N")] = None,
    to_datetime: Annotated[
        str | None, typer.Option(metavar="TIME", help="ISO 8601; UTC without an offset.")
    ] = None,
    shift_by: Annotated[
        int | None, typer.Option(metavar="N", help="Forward, or backward when negative.")
    ] = None,
    by_duration: Annotated[
        str | None, typer.Option(metavar="PnDTnHnMnS", help="So long before now: PT1H30M.")
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC[:0,1]", help="Only these partitions; may be repeated."),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Put positions elsewhere: a dry run unless --execute is given.

    The verbs are those of kafka-consumer-groups --reset-offsets. A reset takes a new epoch, so
    whatever still runs is fenced; the consumer group that mirrors the position follows.
    """
    from oncely.cli.offsets import chosen_verb, reset_offsets

    verb = chosen_verb(
        earliest=to_earliest,
        latest=to_latest,
        offset=to_offset,
        datetime=to_datetime,
        shift=shift_by,
        duration=by_duration,
    )
    reset_offsets(file, verb, topic or [], execute=execute, as_json=as_json)


rejects = typer.Typer(help="List or replay records that could not be written.",
                      no_args_is_help=True)  # fmt: skip
app.add_typer(rejects, name="rejects")


@rejects.command("list")
def rejects_list(
    file: File,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many to show.")] = 50,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """List records that could not be written, and why."""
    from oncely.cli.rejects import list_rejects

    list_rejects(file, limit, as_json)


@rejects.command("replay")
def rejects_replay(file: File, as_json: AsJson = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Decode them again and write those that pass now to the table or topic, exactly once.

    A replayed record is old. With mode = "upsert" it needs a version column, and a key that a
    tombstone has deleted since comes back. In a topic it stands behind newer records of its
    key; a compacted topic is refused.
    """
    from oncely.cli.rejects import replay_rejects

    replay_rejects(file, as_json)


files = typer.Typer(help="The files that a pipeline has written, by its manifest.",
                    no_args_is_help=True)  # fmt: skip
app.add_typer(files, name="files")

Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Only files with this partition value; NAME alone: with no value. Repeat it.",
    ),
]


@files.command("list")
def files_list(
    file: File,
    where: Where = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """List the files that are part of the table."""
    from oncely.cli.files import list_files

    list_files(file, where or [], as_json)


@files.command("read")
def files_read(
    file: File,
    where: Where = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this column; repeat it.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="So many rows at most.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A Parquet file to write instead.", dir_okay=False),
    ] = None,
    rounding: Annotated[
        Rounding,
        typer.Option(help="Whole numbers that their column's type does not hold exactly."),
    ] = Rounding.refuse,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Print rows as JSON, one a line, or write them to a Parquet file.

    It goes by the manifest alone, and compares each file with its published checksum. With
    --json all rows come as one document, beside their columns.
    """
    from oncely.cli.files import read_files

    read_files(file, where or [], column, limit, out, rounding.value, as_json)


@files.command("verify")
def files_verify(file: File, as_json: AsJson = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Fetch every file again; compare checksum, rows, columns, partition values and ranges.

    Exit code 1 when something is not as it was published.
    """
    from oncely.cli.files import verify_files

    raise typer.Exit(verify_files(file, as_json))


@files.command("compact")
def files_compact(
    file: File,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Rewrite small files of a directory as one, up to sink.target_file_size.

    The pipeline may run meanwhile. The old files stay until a vacuum.
    """
    from oncely.cli.files import compact_files

    compact_files(file, dry_run=dry_run, as_json=as_json)


@files.command("vacuum")
def files_vacuum(
    file: File,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Remove files that nobody names and nobody can publish any more, and left-over uploads.

    Never a file that the manifest names, nor one that was replaced less than
    sink.max_staging_age ago. The pipeline may run meanwhile.
    """
    from oncely.cli.files import vacuum_files

    vacuum_files(file, dry_run=dry_run, as_json=as_json)


schema = typer.Typer(help="The schemas that were inferred, by scope.", no_args_is_help=True)
files.add_typer(schema, name="schema")

Scope = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="The scope's value of a partition column, as `show` has it; NAME alone: no value.",
    ),
]


@schema.command("show")
def files_schema_show(
    file: File,
    scope: Scope = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Show the published schema of each scope, or of one."""
    from oncely.cli.schemas import show_schemas

    show_schemas(file, scope or [], as_json)


@schema.command("reset")
def files_schema_reset(
    file: File,
    scope: Scope = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Learn the schema of a scope anew from the rows of its files; stop the pipeline first.

    A column is forgotten when no row has a value in it. Whatever still runs is fenced.
    """
    from oncely.cli.schemas import reset_scope

    reset_scope(file, scope or [], execute=execute, as_json=as_json)


@app.command()
def semantics(
    sink: Annotated[
        list[str] | None,
        typer.Option(metavar="sql|kafka|files", help="Only this sink; may be repeated."),
    ] = None,
    delivery: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='Only this one, such as "at_least_once"; repeat it.'),
    ] = None,
    kill_point: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='Only this one, such as "after the records"; repeat it.'),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", metavar="PATH", help="Where report.json and .html go.")
    ] = Path("build/semantics"),
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Show what each delivery semantics means: kill pipelines at each step of a commit, count.

    Starts a Kafka broker and PostgreSQL of its own and takes some minutes. Exit code 1 when a
    promise was broken.
    """
    from oncely.cli.semantics import show_semantics

    raise typer.Exit(show_semantics(sink or [], delivery or [], kill_point or [], folder, as_json))


local = typer.Typer(help="A Kafka broker and PostgreSQL on this machine, in the background.",
                    no_args_is_help=True)  # fmt: skip
app.add_typer(local, name="local")


@local.command("up")
def local_up(as_json: AsJson = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Start them, and print where they are."""
    from oncely.cli.local import up

    up(as_json)


@local.command("down")
def local_down(
    erase: Annotated[bool, typer.Option("--erase", help="Also delete their data.")] = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Stop them; their data stays."""
    from oncely.cli.local import down

    down(erase)


@local.command("status")
def local_status(as_json: AsJson = False, debug: Debug = False) -> None:  # noqa: ARG001
    """Print where they are; exit code 1 when they don't run."""
    from oncely.cli.local import status as local_status_

    raise typer.Exit(local_status_(as_json))


def main() -> None:
    """Run the command line; ends the process with the command's exit code."""
    try:
        app(prog_name="oncely")
    except Exception as error:
        sys.exit(screen.show_error(error, debug=_debugging))
