"""The commands and their help texts. The work is done in the other modules."""

from __future__ import annotations

import atexit
import gc
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from oncely.cli import options, screen
from oncely.cli.audit_options import Asked
from oncely.cli.options import (
    AllowHost,
    AsJson,
    Commands,
    EventFile,
    Execute,
    File,
    ResetTo,
    Serving,
    SparkLogFile,
    WhichRejects,
    flag,
    option,
)

app = Commands(
    "Moves records from Kafka into SQL databases and topics so that each takes effect once.",
    name="oncely",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Ending = Annotated[
    Literal["latest"] | None,
    typer.Option(help="End when all records that exist at the start are committed."),
]
OnFenced = Literal["end", "wait"]
WorkOnFenced = Annotated[
    OnFenced,
    typer.Option(
        help="end: take over at once, and end when a run on Spark takes over. wait: stand by while"
        " a run on Spark is there that has this option, too."
    ),
]


def _version(value: bool) -> None:
    if value:
        import importlib.metadata

        print(f"oncely {importlib.metadata.version('oncely')}")
        raise typer.Exit


@app.callback()
def _oncely(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Moves records from Kafka into SQL databases and topics so that each takes effect once."""


@app.verb()
def init(
    brokers: Annotated[str, option("HOST:PORT", "More of them after commas; or '${NAME}'.")],
    topic: Annotated[str, option("TOPIC", "The topic to read.")],
    to: Annotated[
        str | None,
        option(
            "WHERE",
            "sqlite:///FILE, postgresql://USER@HOST/DATABASE, a folder or a URL for files,"
            " delta:FOLDER or delta:URL for a Delta table, or topic:NAME; '${NAME}' for a variable"
            " with one of them; by default a file of SQLite.",
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="The number of records to read.")
    ] = 1000,
    registry: Annotated[str | None, option("URL", "The schema registry, for Avro.")] = None,
    kafka: Annotated[
        list[str] | None,
        option("KEY=VALUE", "A property of [source.kafka]; secrets as '${NAME}'. May be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The file to write; - for standard output."
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace a file that exists.")] = False,
) -> None:
    """Propose a pipeline file for a topic, from a sample of its records.

    Reads committed records without a consumer group, and writes nothing but the file: format,
    schema, key, mode and partitioning as the records suggest them, with comments.
    """
    from oncely.cli.init import write_proposal
    from oncely.pipeline.init import Wanted

    wanted = Wanted(brokers, topic, to, registry, options.assigned("--kafka", kafka), sample)
    write_proposal(wanted, out, force=force)


@app.verb()
def run(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="The pipeline file (TOML; - for standard input); several files, or a folder of"
            " them, run in one Spark application.",
            metavar="FILE|FOLDER",
        ),
    ],
    until: Ending = None,
    spark_log: SparkLogFile = None,
    events: EventFile = None,
    on_fenced: Annotated[
        OnFenced,
        typer.Option(
            help="end: take over at once, and end when a newer run takes over. wait: stand by while"
            " another replica runs, and take over when it has gone; give it to all replicas."
        ),
    ] = "end",
    *,
    serving: Serving,
) -> int:
    """Run pipelines until Ctrl-C, or until all present records are committed.

    Ctrl-C or SIGTERM ends it after the current batch; a second signal ends it at once. Of several
    pipelines, one that fails ends alone; the command ends with the last one.

    Exit codes: 0 success (with --until: all is committed); 2 wrong input; 3 fenced by a newer run
    (do not restart); 1 other errors. Of several pipelines the highest.
    """
    from oncely.cli.run import probes, run_files

    return run_files(files, until, spark_log, events, probes(serving), on_fenced)


@app.verb()
def work(
    file: Annotated[
        Path,
        typer.Argument(
            help="The pipeline file (TOML; - for standard input), or a module and its"
            " oncely.Worker.",
            metavar="FILE|MODULE:APP",
        ),
    ],
    until: Ending = None,
    events: EventFile = None,
    on_fenced: WorkOnFenced = "end",
    *,
    serving: Serving,
) -> int:
    """Run a pipeline, or handlers, as a member of a consumer group, without Spark, until Ctrl-C.

    Start it in as many processes as there is work for: the group shares the partitions among them.
    Ctrl-C or SIGTERM ends it after the current commit; a second signal ends it at once.

    Exit codes: as those of `oncely run`.
    """
    from oncely.cli.run import probes, work_file

    return work_file(file, until, events, probes(serving), on_fenced)


@app.verb()
def plan(
    file: File,
    spark: Annotated[
        bool | None,
        flag(
            "--spark/--no-spark",
            "Start Spark to check the executors and the columns of a Spark transform;"
            " by default only if needed.",
        ),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            min=0, max=100_000, metavar="N", help="Decode and transform N records of the topics."
        ),
    ] = 0,
    guarantee: Annotated[
        bool, flag("--guarantee", "Print the reasons and limits of the guarantee.")
    ] = False,
    ddl: Annotated[
        bool, flag("--ddl", "Print columns, the DDL of what is missing, and Kafka ACLs.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Check the pipeline and print the effects of a run; writes nothing.

    --json has all of it. Exit codes: 0 it can run; 2 it needs changes; 1 a server does not answer.
    """
    from oncely.cli.plan import show_plan

    return show_plan(file, spark, sample, as_json, guarantee=guarantee, ddl=ddl)


@app.verb("schema")
def schema_of_file(
    markdown: Annotated[bool, flag("--markdown", "The reference for people, as Markdown.")] = False,
) -> None:
    """Print the JSON Schema of pipeline files, for editors.

    An editor that knows TOML completes and checks a file that begins with `#:schema PATH`, the
    path of what this command has printed.
    """
    from oncely.config import reference

    sys.stdout.write(
        reference.markdown() if markdown else json.dumps(reference.json_schema(), indent=2) + "\n"
    )


@app.verb()
def verify(
    file: File,
    events: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="An event log of the pipeline; may be repeated.", dir_okay=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check each step of the ledger, the manifest and event logs; reads no rows and no records.

    Ranges follow each other from the start to the position, no fenced run has committed, files are
    stored and named once, and events tell the same as the ledger. Prints the first broken step.

    Exit codes: 0 all of it holds; 1 a step is broken; 4 unknown: what would prove a step is not
    stored any more.
    """
    from oncely.cli.verify import verify_file

    return verify_file(file, events or [], as_json)


Pipelines = Annotated[
    list[Path],
    typer.Argument(help="Pipeline files, or folders of them (*.toml).", metavar="FILE|FOLDER"),
]


@app.verb()
def status(
    paths: Pipelines,
    check: Annotated[
        bool, flag("--check", "The exit code tells the worst verdict, for a monitoring system.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show position, end and lag of every partition, rejects and epoch; of several an overview.

    Exit codes with --check: 0 good; 1 behind, dead letters, or it never ran; 2 stalled, or the next
    start would be refused; 3 it can't be read.
    """
    from oncely.cli.status import show_status

    return show_status(paths, as_json=as_json, check=check)


Every = Annotated[
    float, typer.Option(min=0.5, metavar="SECONDS", help="The time between two readings.")
]


@app.verb()
def web(
    paths: Pipelines,
    listen: Annotated[
        str, option("HOST:PORT", "Without a host for this machine only.")
    ] = "127.0.0.1:8484",
    token: Annotated[
        bool,
        flag(
            "--token",
            "Print a token, without which nobody reads, and with which a visitor may also replay"
            " dead letters and reset positions."
            " ONCELY_WEB_TOKEN, if it is set, is used instead.",
        ),
    ] = False,
    allow_host: AllowHost = None,
    audits: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Reports of `oncely audit --json`.", file_okay=False),
    ] = None,
    every: Every = 5.0,
) -> None:
    """Serve pages on the ledgers of pipelines: progress, takeovers, dead letters, files, audits.

    Read-only unless a token is given. Readings go on only while somebody looks.
    """
    from oncely.cli.web import serve

    serve(paths, listen, allow_host or [], audits, every, make_token=token)


@app.verb()
def top(
    paths: Pipelines,
    once: Annotated[bool, flag("--once", "Print it once and end.")] = False,
    every: Every = 2.0,
) -> int:
    """Show the progress of pipelines in the terminal, until Ctrl-C.

    Exit codes with --once: those of `oncely status --check`.
    """
    from oncely.cli.top import top as show_top

    return show_top(paths, every, once=once)


@app.verb()
def audit(*, asked: Asked) -> int:
    """Compare a pipeline's topics with its destination, offset by offset; or any two datasets.

    Writes nothing. The pipeline may run meanwhile. Trusts nothing of it: topic and destination are
    read again. With --left and --right the records of any pipeline are compared, by id or by the
    offsets in its rows.

    Exit codes: 0 clean; 1 damaged; 4 not all could be proved; 2 wrong input.
    """
    from oncely.cli.audits import audit_command

    return audit_command(asked)


offsets = app.group("offsets", "Show or reset positions.")


@offsets.verb("show")
def offsets_show(file: File, as_json: AsJson = False) -> None:
    """Show first offset, position, end and mirrored offset of every partition."""
    from oncely.cli.offsets import show_offsets

    show_offsets(file, as_json)


@offsets.verb("reset")
def offsets_reset(
    file: File,
    *,
    to: ResetTo,
    topic: Annotated[
        list[str] | None, option("TOPIC[:0,1]", "Only these partitions; may be repeated.")
    ] = None,
    execute: Execute = False,
    events: EventFile = None,
    as_json: AsJson = False,
) -> None:
    """Move positions: a dry run unless --execute is given.

    The verbs are those of kafka-consumer-groups --reset-offsets. A reset takes a new epoch, so a
    running pipeline is fenced; the consumer group that mirrors the position follows.
    """
    from oncely.cli.offsets import chosen_verb, reset_offsets

    reset_offsets(
        file, chosen_verb(to), topic or [], execute=execute, events=events, as_json=as_json
    )


rejects = app.group("rejects", "List, replay or discard records that could not be written.")


@rejects.verb("list")
def rejects_list(
    file: File,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Number of records to show.")] = 50,
    *,
    which: WhichRejects,
    discarded: Annotated[bool, flag("--discarded", "Those that were discarded.")] = False,
    as_json: AsJson = False,
) -> None:
    """List records that could not be written: the reasons with their numbers, then records."""
    from oncely.cli.rejects import list_rejects, reject_filter

    list_rejects(file, limit, reject_filter(which), discarded=discarded, as_json=as_json)


@rejects.verb("discard")
def rejects_discard(
    file: File,
    *,
    which: WhichRejects,
    execute: Annotated[bool, flag("--yes/--dry-run", "Do it; by default it only counts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove key, value and headers of dead letters for good: a dry run unless --yes is given.

    A discarded dead letter is not replayed any more. Its offset and a masked reason stay, so that
    audits still account for the record. Refused for dead letters in topics. The pipeline may run
    meanwhile.
    """
    from oncely.cli.rejects import discard_rejects, reject_filter

    discard_rejects(file, reject_filter(which), execute=execute, as_json=as_json)


@rejects.verb("replay")
def rejects_replay(file: File, as_json: AsJson = False) -> None:
    """Decode dead letters again and write the valid ones to the table or topic, exactly once.

    A replayed record is old. With mode = "upsert" it needs a version column, and it restores a key
    that a tombstone has deleted since. In a topic it follows newer records of its key; a compacted
    topic is refused.
    """
    from oncely.cli.rejects import replay_rejects

    replay_rejects(file, as_json)


@app.verb()
def repair(
    file: File,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A report of `oncely audit --json`; by default it audits now.",
            dir_okay=False,
        ),
    ] = None,
    execute: Execute = False,
    max_removed: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Refuse to remove more rows, or more rejects, than N without a replacement.",
        ),
    ] = 100,
    events: EventFile = None,
    as_json: AsJson = False,
) -> int:
    """Repair what an audit has found: a dry run unless --execute is given.

    Lost records are read again from the topic and written; surplus rows are removed, altered rows
    replaced. The pipeline may run meanwhile. With --execute it audits again at the end.

    Exit codes: those of the audit: 0 clean, 1 damaged, 4 unknown; 2 wrong input, or more would be
    removed than --max-removed allows.
    """
    from oncely.cli.repair import repair_file

    return repair_file(
        file, report, execute=execute, max_removed=max_removed, as_json=as_json, events=events
    )


@app.verb()
def backfill(
    file: File,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="ISO 8601; UTC without an offset."),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Before this time; by default now.")
    ] = None,
    offsets: Annotated[
        list[str] | None, option("TOPIC:PARTITION:START-END", "Offsets; may be repeated.")
    ] = None,
    execute: Execute = False,
    events: EventFile = None,
    as_json: AsJson = False,
) -> int:
    """Process a range of records again with the present transform: a dry run unless --execute.

    The rows and rejects of these records are replaced, in transactions of whole records. The
    pipeline may run meanwhile. With --execute it audits at the end.

    Exit codes: those of the audit: 0 clean, 1 damaged, 4 unknown; 2 wrong input.
    """
    from oncely.cli.repair import backfill_file

    return backfill_file(
        file, begin, end, offsets or [], execute=execute, as_json=as_json, events=events
    )


files = app.group("files", "The files that a pipeline has written, by its manifest.")

Where = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE", "Only files with this partition value; NAME alone: no value. May be repeated."
    ),
]


@files.verb("list")
def files_list(
    file: File,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """List the files that are part of the table."""
    from oncely.cli.files import list_files

    list_files(file, where or [], as_json)


@files.verb("paths")
def files_paths(
    file: File,
    where: Where = None,
    plain: Annotated[bool, flag("--plain", "Print the paths alone.")] = False,
) -> None:
    """Print the files that are part of the table as other programs open them, as JSON lines.

    A line has the local path or URL, format, rows, bytes and, in a partitioned table, the partition
    values. docs/reading-files.md shows how DuckDB, polars and Spark read just these files.
    """
    from oncely.cli.files import list_paths

    list_paths(file, where or [], plain=plain)


@files.verb("read")
def files_read(
    file: File,
    where: Where = None,
    column: Annotated[
        list[str] | None, option("NAME", "Only this column; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum number of rows.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A Parquet file to write instead.", dir_okay=False),
    ] = None,
    rounding: Annotated[
        Literal["refuse", "allow"],
        typer.Option(help="Whole numbers without an exact value in their column's type."),
    ] = "refuse",
    as_json: AsJson = False,
) -> None:
    """Print rows as JSON lines, or write them to a Parquet file.

    Reads only files of the manifest, and compares each with its published checksum. With --json all
    rows are one document, beside their columns.
    """
    from oncely.cli.files import read_files

    read_files(file, where or [], column, limit, out, rounding, as_json)


@files.verb("verify")
def files_verify(file: File, as_json: AsJson = False) -> int:
    """Read every file; compare checksum, rows, columns, partition values and ranges.

    Exit code 1 if a file differs from its published state.
    """
    from oncely.cli.files import verify_files

    return verify_files(file, as_json)


@files.verb("compact")
def files_compact(
    file: File,
    dry_run: Annotated[bool, flag("--dry-run", "Print the plan only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge small files of a directory, up to sink.target_file_size.

    The pipeline may run meanwhile. The old files are kept until a vacuum.
    """
    from oncely.cli.files import compact_files

    compact_files(file, dry_run=dry_run, as_json=as_json)


@files.verb("vacuum")
def files_vacuum(
    file: File,
    dry_run: Annotated[bool, flag("--dry-run", "Print the orphans only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove orphans: files that are not in the manifest and cannot be published any more.

    Keeps every file of the manifest, and files that were replaced less than sink.max_staging_age
    ago. The pipeline may run meanwhile. Incomplete multipart uploads of S3 are removed by a
    lifecycle rule of the bucket (AbortIncompleteMultipartUpload).
    """
    from oncely.cli.files import vacuum_files

    vacuum_files(file, dry_run=dry_run, as_json=as_json)


schema = files.group("schema", "The schemas that were inferred, by scope.")

Scope = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE",
        "The scope's value of a partition column, as printed by `show`; NAME alone: no value.",
    ),
]


@schema.verb("show")
def files_schema_show(
    file: File,
    scope: Scope = None,
    as_json: AsJson = False,
) -> None:
    """Show the published schema of each scope, or of a given scope."""
    from oncely.cli.schemas import show_schemas

    show_schemas(file, scope or [], as_json)


@schema.verb("reset")
def files_schema_reset(
    file: File,
    scope: Scope = None,
    execute: Execute = False,
    as_json: AsJson = False,
) -> None:
    """Infer the schema of a scope again from the rows of its files; stop the pipeline first.

    A column is dropped if no row has a value in it. A running pipeline is fenced.
    """
    from oncely.cli.schemas import reset_scope

    reset_scope(file, scope or [], execute=execute, as_json=as_json)


@app.verb()
def semantics(
    sink: Annotated[
        list[str] | None, option("sql|kafka|files", "Only this sink; may be repeated.")
    ] = None,
    delivery: Annotated[
        list[str] | None, option("NAME", "Only these semantics; may be repeated.")
    ] = None,
    kill_point: Annotated[
        list[str] | None, option("NAME", "Only this step; may be repeated.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--out", metavar="PATH", help="Folder of report.json and report.html.")
    ] = Path("build/semantics"),
    runtime: Annotated[
        Literal["spark", "processes"],
        typer.Option(help="Where tasks of the pipelines run; each death on spark takes longer."),
    ] = "processes",
    as_json: AsJson = False,
) -> int:
    """Demonstrate the delivery semantics: kill pipelines at each step of a commit, and count the
    records.

    Starts a Kafka broker and PostgreSQL of its own and takes some minutes. Exit code 1 if a
    guarantee was broken.
    """
    from oncely.cli.semantics import show_semantics

    on_spark = runtime == "spark"
    return show_semantics(
        sink or [], delivery or [], kill_point or [], folder, on_spark=on_spark, as_json=as_json
    )


@app.verb()
def torture(
    app_path: Annotated[
        str, typer.Argument(help="A module and its oncely.Worker.", metavar="MODULE:APP")
    ],
    table: Annotated[
        list[str] | None, option("NAME", "A table of the handlers; may be repeated.")
    ] = None,
    setup: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="SQL that creates the tables.", dir_okay=False),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help='JSON lines: {"topic", "key", "value", "headers"}; by default samples.',
            dir_okay=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, option("COLUMN", "A column that may differ; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Kill handlers before and after each step of their commits, and compare their tables.

    Starts a Kafka broker and PostgreSQL of its own: no other server is used by the worker. After
    each kill another process goes on; the tables must be those of a run without faults.

    Exit codes: 0 they are; 1 they are not; 2 wrong input.
    """
    from oncely.cli.torture import torture_app

    return torture_app(app_path, table or [], setup, records, ignore or [], as_json=as_json)


local = app.group("local", "A Kafka broker and PostgreSQL on this machine, in the background.")


LocalFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Their data; by default $ONCELY_LOCAL_DIR, or ~/.cache/oncely/local."
    ),
]


@local.verb("up")
def local_up(
    folder: LocalFolder = None,
    export: Annotated[
        bool,
        flag(
            "--export",
            'Print shell commands that set BROKERS and POSTGRES: eval "$(oncely local up'
            ' --export)".',
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start the servers, and print their addresses with the password of PostgreSQL."""
    from oncely.cli.local import up

    up(folder, as_json, export=export)


@local.verb("down")
def local_down(
    folder: LocalFolder = None,
    erase: Annotated[bool, flag("--erase", "Also delete their data.")] = False,
) -> None:
    """Stop the servers; their data is kept."""
    from oncely.cli.local import down

    down(folder, erase=erase)


@local.verb("status")
def local_status(folder: LocalFolder = None, as_json: AsJson = False) -> int:
    """Print the addresses of the servers, no password; exit code 1 if they are not running."""
    from oncely.cli.local import status as local_status_

    return local_status_(folder, as_json)


Topic = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")]
OtherBrokers = Annotated[
    str | None, option("HOST:PORT", "Another broker than that of `oncely local up`.")
]


@local.verb("produce")
def local_produce(
    topic: Topic,
    key: Annotated[
        str | None, option("FIELD", "Lines are JSON objects; this field is the key.")
    ] = None,
    records: Annotated[
        bool,
        flag(
            "--records",
            'Lines are records: {"key", "value", "headers"}; also what `consume` prints.',
        ),
    ] = False,
    partitions: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of a topic that it creates.")
    ] = None,
    brokers: OtherBrokers = None,
    folder: LocalFolder = None,
) -> None:
    """Write each line of standard input to a topic as the value of a record, until its end.

    Empty lines are skipped. A missing topic is created on the local broker, elsewhere only with
    --partitions. With --key or --records nothing is written before all lines are checked.
    """
    from oncely.cli.local_topics import produce

    produce(topic, key=key, records=records, partitions=partitions, brokers=brokers, folder=folder)


@local.verb("consume")
def local_consume(
    topic: Topic,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new records until Ctrl-C.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum number of records.")
    ] = None,
    brokers: OtherBrokers = None,
    folder: LocalFolder = None,
) -> None:
    """Print the committed records of a topic as JSON lines, partition by partition.

    Bytes that are not UTF-8 are {"base64": ...}. It uses no consumer group.
    """
    from oncely.cli.local_topics import consume

    consume(topic, follow=follow, limit=limit, brokers=brokers, folder=folder)


def main() -> None:
    """Run the command line; ends the process with the command's exit code."""
    atexit.register(_leave_out_collection)
    screen.escape_other_characters()
    try:
        app(prog_name="oncely")
    except Exception as error:
        sys.exit(screen.show_error(error, debug=options.log["debug"]))


def _leave_out_collection() -> None:
    """Exempt all objects from the collections at the interpreter's exit, which take 0.2 s.

    DuckDB's bindings report objects that are left then.
    """
    if "duckdb" not in sys.modules:
        gc.freeze()
