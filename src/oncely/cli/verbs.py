"""The command line: its verbs with their help texts and options, the function that does the work of
each, and the start."""

from __future__ import annotations

import atexit
import gc
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from oncely.cli import options, screen
from oncely.cli.options import (
    Commands,
    LogFormat,
    Options,
    Reporting,
    argument,
    flag,
    log_changes,
    option,
)

Ending = Literal["latest"]
OnFenced = Literal["end", "wait"]
_ALLOW_HOST = option(
    "NAME", "Another name under which the HTTP server is reached; may be repeated."
)
_BROKERS = option("HOST:PORT", "Another broker than that of `oncely local up`.")
_EVENTS = option(
    "PATH",
    "Append events to this file, as JSON lines (docs/events.md); in a folder to a file for each"
    " pipeline.",
)
_FOLDER = option("FOLDER", "Their data; by default $ONCELY_LOCAL_DIR, or ~/.cache/oncely/local.")
_PATHS = argument("FILE|FOLDER", "Pipeline files, or folders of them (*.toml).")
_TOPIC = argument("TOPIC", "The topic.")
_UNTIL = option(None, "End when all records that exist at the start are committed.")


class OfFile(Options):
    """Of a pipeline file."""

    file: Path = argument("FILE", "The pipeline file (TOML); - for standard input.")


class Told(OfFile, Reporting):
    """Of a pipeline file, with a report."""


class OfFiles(OfFile):
    """Of some files of a table."""

    where: list[str] | None = option(
        "NAME=VALUE", "Only files with this partition value; NAME alone: no value. May be repeated."
    )


class OfScope(Told):
    """Of a scope of a table's schemas."""

    scope: list[str] | None = option(
        "NAME=VALUE",
        "The scope's value of a partition column, as printed by `show`; NAME alone: no value.",
    )


class Serving(Options):
    """What a run serves by HTTP, and the format of its log."""

    http: str | None = option(
        "HOST:PORT",
        "Serve /livez, /readyz and /metrics there (docs/probes.md);"
        " without a host for this machine only.",
    )
    polling_ttl: str | None = option(
        "TIME", "/livez fails without a look for records for longer; 5 minutes."
    )
    consuming_ttl: str | None = option(
        "TIME", "/livez fails without a commit for longer, if there are records; 1 minute."
    )
    metrics: str | None = option(
        "HOST:PORT",
        "Serve metrics for Prometheus there (docs/metrics.md), without the probes of --http.",
    )
    allow_host: list[str] | None = _ALLOW_HOST
    log_format: LogFormat = option(
        None,
        "json: one object a line on stderr (docs/metrics.md).",
        default="text",
        callback=log_changes,
    )


class ResetTo(Options):
    """The verbs of a reset, of which one is given."""

    to_earliest: bool = flag(None)
    to_latest: bool = flag(None)
    to_offset: int | None = option("N", None)
    to_datetime: str | None = option("TIME", "ISO 8601; UTC without an offset.")
    shift_by: int | None = option("N", "Forward, or backward when negative.")
    by_duration: str | None = option("PnDTnHnMnS", "Duration before now: PT1H30M.")


class WhichRejects(Options):
    """The conditions of rejects."""

    reason: str | None = option("TEXT", "Only rejects with this text in the reason.")
    partition: list[str] | None = option(
        "TOPIC[:0,1]", "Only of these partitions; may be repeated."
    )
    since: str | None = option("TIME", "Only of records at or after it (UTC), or no older: 12h.")
    before: str | None = option("TIME", "Only of records before it (UTC), or older: 90d.")


class Init(Options):
    """Propose a pipeline file for a topic, from a sample of its records.

    Reads committed records without a consumer group, and writes nothing but the file: format,
    schema, key, mode and partitioning as the records suggest them, with comments.
    """

    brokers: str = option("HOST:PORT", "More of them after commas; or '${NAME}'.", default=...)
    topic: str = option("TOPIC", "The topic to read.", default=...)
    to: str | None = option(
        "WHERE",
        "sqlite:///FILE, postgresql://USER@HOST/DATABASE, a folder or a URL for files,"
        " delta:FOLDER or delta:URL for a Delta table, or topic:NAME; '${NAME}' for a variable"
        " with one of them; by default a file of SQLite.",
    )
    sample: int = option("N", "The number of records to read.", default=1000, min=1, max=100_000)
    registry: str | None = option("URL", "The schema registry, for Avro.")
    kafka: list[str] | None = option(
        "KEY=VALUE", "A property of [source.kafka]; secrets as '${NAME}'. May be repeated."
    )
    out: Path | None = option("FILE", "The file to write; - for standard output.", "-o", "--out")
    force: bool = flag("Replace a file that exists.")


class Run(Options):
    """Run pipelines until Ctrl-C, or until all present records are committed.

    Ctrl-C or SIGTERM ends it after the current batch; a second signal ends it at once. Of several
    pipelines, one that fails ends alone; the command ends with the last one.

    Exit codes: 0 success (with --until: all is committed); 2 wrong input; 3 fenced by a newer run
    (do not restart); 1 other errors. Of several pipelines the highest.
    """

    files: list[Path] = argument(
        "FILE|FOLDER",
        "The pipeline file (TOML; - for standard input); several files, or a folder of"
        " them, run in one Spark application.",
    )
    until: Ending | None = _UNTIL
    spark_log: Path | None = option(
        "PATH", "File for Spark's own output; - for stderr.", dir_okay=False
    )
    events: Path | None = _EVENTS
    on_fenced: OnFenced = option(
        None,
        "end: take over at once, and end when a newer run takes over. wait: stand by while"
        " another replica runs, and take over when it has gone; give it to all replicas.",
        default="end",
    )
    serving: Serving = Serving()


class Work(Options):
    """Run a pipeline, or handlers, as a member of a consumer group, without Spark, until Ctrl-C.

    Start it in as many processes as there is work for: the group shares the partitions among them.
    Ctrl-C or SIGTERM ends it after the current commit; a second signal ends it at once.

    Exit codes: as those of `oncely run`.
    """

    file: Path = argument(
        "FILE|MODULE:APP",
        "The pipeline file (TOML; - for standard input), or a module and its oncely.Worker.",
    )
    until: Ending | None = _UNTIL
    events: Path | None = _EVENTS
    on_fenced: OnFenced = option(
        None,
        "end: take over at once, and end when a run on Spark takes over. wait: stand by while"
        " a run on Spark is there that has this option, too.",
        default="end",
    )
    serving: Serving = Serving()


class Plan(Told):
    """Check the pipeline and print the effects of a run; writes nothing.

    --json has all of it. Exit codes: 0 it can run; 2 it needs changes; 1 a server does not answer.
    """

    spark: bool | None = flag(
        "Start Spark to check the executors and the columns of a Spark transform;"
        " by default only if needed.",
        "--spark/--no-spark",
        default=None,
    )
    sample: int = option(
        "N", "Decode and transform N records of the topics.", default=0, min=0, max=100_000
    )
    guarantee: bool = flag("Print the reasons and limits of the guarantee.")
    ddl: bool = flag("Print columns, the DDL of what is missing, and Kafka ACLs.")


class Schema(Options):
    """Print the JSON Schema of pipeline files, for editors.

    An editor that knows TOML completes and checks a file that begins with `#:schema PATH`, the
    path of what this command has printed.
    """

    markdown: bool = flag("The reference for people, as Markdown.")


class Verify(Told):
    """Check each step of the ledger, the manifest and event logs; reads no rows and no records.

    Ranges follow each other from the start to the position, no fenced run has committed, files are
    stored and named once, and events tell the same as the ledger. Prints the first broken step.

    Exit codes: 0 all of it holds; 1 a step is broken; 4 unknown: what would prove a step is not
    stored any more.
    """

    events: list[Path] | None = option(
        "PATH", "An event log of the pipeline; may be repeated.", dir_okay=False
    )


class Status(Reporting):
    """Show position, end and lag of every partition, rejects and epoch; of several an overview.

    Exit codes with --check: 0 good; 1 behind, dead letters, or it never ran; 2 stalled, or the next
    start would be refused; 3 it can't be read.
    """

    paths: list[Path] = _PATHS
    check: bool = flag("The exit code tells the worst verdict, for a monitoring system.")


class Web(Options):
    """Serve pages on the ledgers of pipelines: progress, takeovers, dead letters, files, audits.

    Read-only unless a token is given. Readings go on only while somebody looks.
    """

    paths: list[Path] = _PATHS
    listen: str = option(
        "HOST:PORT", "Without a host for this machine only.", default="127.0.0.1:8484"
    )
    token: bool = flag(
        "Print a token, without which nobody reads, and with which a visitor may also replay"
        " dead letters and reset positions."
        " ONCELY_WEB_TOKEN, if it is set, is used instead."
    )
    allow_host: list[str] | None = _ALLOW_HOST
    audits: Path | None = option("FOLDER", "Reports of `oncely audit --json`.", file_okay=False)
    every: float = option("SECONDS", "The time between two readings.", default=5.0, min=0.5)


class Top(Options):
    """Show the progress of pipelines in the terminal, until Ctrl-C.

    Exit codes with --once: those of `oncely status --check`.
    """

    paths: list[Path] = _PATHS
    once: bool = flag("Print it once and end.")
    every: float = option("SECONDS", "The time between two readings.", default=2.0, min=0.5)


class Audit(Reporting):
    """Compare a pipeline's topics with its destination, offset by offset; or any two datasets.

    Writes nothing. The pipeline may run meanwhile. Trusts nothing of it: topic and destination are
    read again. With --left and --right the records of any pipeline are compared, by id or by the
    offsets in its rows.

    Exit codes: 0 clean; 1 damaged; 4 not all could be proved; 2 wrong input.
    """

    file: Path | None = argument(
        "[FILE]",
        "The pipeline file (- for standard input), or a TOML file with [left] and [right].",
        default=None,
    )
    left: str | None = option(
        "SPEC", "A topic or dataset, such as kafka:orders?brokers=HOST:9092 or parquet:/path."
    )
    right: str | None = option(
        "SPEC",
        "The dataset that should have its records,"
        " such as 'jdbc:postgresql://HOST/DB?dbtable=orders'.",
    )
    id: str | None = option("EXPR", "Compare by this Spark SQL expression.")
    id_left: str | None = option("EXPR", "The id on the left.")
    id_right: str | None = option("EXPR", "The id on the right.")
    by: str | None = option("EXPR", "Count by group, such as hour(ts).")
    source_columns: str | None = option(
        "TOPIC,PARTITION,OFFSET", "Compare by these columns of the right side."
    )
    keyed: bool = flag("The right side keeps one row of each id.")
    conf: list[str] | None = option("KEY=VALUE", "A setting of Spark; may be repeated.")
    since: str | None = option("TIME", "Only records from this time on.")
    until: str | None = option(
        "TIME", "Compare only records before this time: ISO 8601; UTC without an offset."
    )
    limit: int = option("N", "Number of findings of each kind to show.", default=50, min=1)
    download: bool = flag(
        "Read every file of a files sink or Delta table again, and compare its rows."
    )
    html: Path | None = option("PATH", "Write the report as a page.")
    watch: bool = flag(
        "Audit again and again; with --until, until all records up to that time are proved."
    )
    every: str = option("SECONDS", "Time between two audits.", default="60")
    timeout: str | None = option("SECONDS", "End a watch after this time.")
    metrics: str | None = option("HOST:PORT", "Serve the state of a watch to Prometheus.")
    allow_host: list[str] | None = _ALLOW_HOST

    @property
    def match(self) -> dict[str, str | None]:
        """How rows and records are compared: by expressions or columns, by option."""
        names = ("id", "id_left", "id_right", "by", "source_columns")
        return {name: getattr(self, name) for name in names}


class OffsetsShow(Told):
    """Show first offset, position, end and mirrored offset of every partition."""


class OffsetsReset(Told):
    """Move positions: a dry run unless --execute is given.

    The verbs are those of kafka-consumer-groups --reset-offsets. A reset takes a new epoch, so a
    running pipeline is fenced; the consumer group that mirrors the position follows.
    """

    to: ResetTo = ResetTo()
    topic: list[str] | None = option("TOPIC[:0,1]", "Only these partitions; may be repeated.")
    execute: bool = flag("Do it.")
    events: Path | None = _EVENTS


class RejectsList(Told):
    """List records that could not be written: the reasons with their numbers, then records."""

    limit: int = option("N", "Number of records to show.", default=50, min=1)
    which: WhichRejects = WhichRejects()
    discarded: bool = flag("Those that were discarded.")


class RejectsDiscard(Told):
    """Remove key, value and headers of dead letters for good: a dry run unless --yes is given.

    A discarded dead letter is not replayed any more. Its offset and a masked reason stay, so that
    audits still account for the record. Refused for dead letters in topics. The pipeline may run
    meanwhile.
    """

    which: WhichRejects = WhichRejects()
    execute: bool = flag("Do it; by default it only counts.", "--yes/--dry-run")


class RejectsReplay(Told):
    """Decode dead letters again and write the valid ones to the table or topic, exactly once.

    A replayed record is old. With mode = "upsert" it needs a version column, and it restores a key
    that a tombstone has deleted since. In a topic it follows newer records of its key; a compacted
    topic is refused.
    """


class Repair(Told):
    """Repair what an audit has found: a dry run unless --execute is given.

    Lost records are read again from the topic and written; surplus rows are removed, altered rows
    replaced. The pipeline may run meanwhile. With --execute it audits again at the end.

    Exit codes: those of the audit: 0 clean, 1 damaged, 4 unknown; 2 wrong input, or more would be
    removed than --max-removed allows.
    """

    report: Path | None = option(
        "PATH", "A report of `oncely audit --json`; by default it audits now.", dir_okay=False
    )
    execute: bool = flag("Do it.")
    max_removed: int = option(
        "N",
        "Refuse to remove more rows, or more rejects, than N without a replacement.",
        default=100,
        min=0,
    )
    events: Path | None = _EVENTS


class Backfill(Told):
    """Process a range of records again with the present transform: a dry run unless --execute.

    The rows and rejects of these records are replaced, in transactions of whole records. The
    pipeline may run meanwhile. With --execute it audits at the end.

    Exit codes: those of the audit: 0 clean, 1 damaged, 4 unknown; 2 wrong input.
    """

    begin: str | None = option("TIME", "ISO 8601; UTC without an offset.", "--from")
    end: str | None = option("TIME", "Before this time; by default now.", "--to")
    offsets: list[str] | None = option("TOPIC:PARTITION:START-END", "Offsets; may be repeated.")
    execute: bool = flag("Do it.")
    events: Path | None = _EVENTS


class FilesList(OfFiles, Reporting):
    """List the files that are part of the table."""


class FilesPaths(OfFiles):
    """Print the files that are part of the table as other programs open them, as JSON lines.

    A line has the local path or URL, format, rows, bytes and, in a partitioned table, the partition
    values. docs/reading-files.md shows how DuckDB, polars and Spark read just these files.
    """

    plain: bool = flag("Print the paths alone.")


class FilesRead(OfFiles, Reporting):
    """Print rows as JSON lines, or write them to a Parquet file.

    Reads only files of the manifest, and compares each with its published checksum. With --json all
    rows are one document, beside their columns.
    """

    column: list[str] | None = option("NAME", "Only this column; may be repeated.")
    limit: int | None = option("N", "Maximum number of rows.", min=1)
    out: Path | None = option("PATH", "A Parquet file to write instead.", dir_okay=False)
    rounding: Literal["refuse", "allow"] = option(
        None, "Whole numbers without an exact value in their column's type.", default="refuse"
    )


class FilesVerify(Told):
    """Read every file; compare checksum, rows, columns, partition values and ranges.

    Exit code 1 if a file differs from its published state.
    """


class FilesCompact(Told):
    """Merge small files of a directory, up to sink.target_file_size.

    The pipeline may run meanwhile. The old files are kept until a vacuum.
    """

    dry_run: bool = flag("Print the plan only.")


class FilesVacuum(Told):
    """Remove orphans: files that are not in the manifest and cannot be published any more.

    Keeps every file of the manifest, and files that were replaced less than sink.max_staging_age
    ago. The pipeline may run meanwhile. Incomplete multipart uploads of S3 are removed by a
    lifecycle rule of the bucket (AbortIncompleteMultipartUpload).
    """

    dry_run: bool = flag("Print the orphans only.")


class FilesSchemaShow(OfScope):
    """Show the published schema of each scope, or of a given scope."""


class FilesSchemaReset(OfScope):
    """Infer the schema of a scope again from the rows of its files; stop the pipeline first.

    A column is dropped if no row has a value in it. A running pipeline is fenced.
    """

    execute: bool = flag("Do it.")


class Semantics(Reporting):
    """Demonstrate the delivery semantics: kill pipelines at each step of a commit, and count the
    records.

    Starts a Kafka broker and PostgreSQL of its own and takes some minutes. Exit code 1 if a
    guarantee was broken.
    """

    sink: list[str] | None = option("sql|kafka|files", "Only this sink; may be repeated.")
    delivery: list[str] | None = option("NAME", "Only these semantics; may be repeated.")
    kill_point: list[str] | None = option("NAME", "Only this step; may be repeated.")
    folder: Path = option(
        "PATH", "Folder of report.json and report.html.", "--out", default=Path("build/semantics")
    )
    runtime: Literal["spark", "processes"] = option(
        None,
        "Where tasks of the pipelines run; each death on spark takes longer.",
        default="processes",
    )


class Torture(Reporting):
    """Kill handlers before and after each step of their commits, and compare their tables.

    Starts a Kafka broker and PostgreSQL of its own: no other server is used by the worker. After
    each kill another process goes on; the tables must be those of a run without faults.

    Exit codes: 0 they are; 1 they are not; 2 wrong input.
    """

    app_path: str = argument("MODULE:APP", "A module and its oncely.Worker.")
    table: list[str] | None = option("NAME", "A table of the handlers; may be repeated.")
    setup: Path | None = option("PATH", "SQL that creates the tables.", dir_okay=False)
    records: Path | None = option(
        "PATH",
        'JSON lines: {"topic", "key", "value", "headers"}; by default samples.',
        dir_okay=False,
    )
    ignore: list[str] | None = option("COLUMN", "A column that may differ; may be repeated.")


class LocalUp(Reporting):
    """Start the servers, and print their addresses with the password of PostgreSQL."""

    folder: Path | None = _FOLDER
    export: bool = flag(
        'Print shell commands that set BROKERS and POSTGRES: eval "$(oncely local up --export)".'
    )


class LocalDown(Options):
    """Stop the servers; their data is kept."""

    folder: Path | None = _FOLDER
    erase: bool = flag("Also delete their data.")


class LocalStatus(Reporting):
    """Print the addresses of the servers, no password; exit code 1 if they are not running."""

    folder: Path | None = _FOLDER


class LocalProduce(Options):
    """Write each line of standard input to a topic as the value of a record, until its end.

    Empty lines are skipped. A missing topic is created on the local broker, elsewhere only with
    --partitions. With --key or --records nothing is written before all lines are checked.
    """

    topic: str = _TOPIC
    key: str | None = option("FIELD", "Lines are JSON objects; this field is the key.")
    records: bool = flag(
        'Lines are records: {"key", "value", "headers"}; also what `consume` prints.'
    )
    partitions: int | None = option("N", "Of a topic that it creates.", min=1)
    brokers: str | None = _BROKERS
    folder: Path | None = _FOLDER


class LocalConsume(Options):
    """Print the committed records of a topic as JSON lines, partition by partition.

    Bytes that are not UTF-8 are {"base64": ...}. It uses no consumer group.
    """

    topic: str = _TOPIC
    follow: bool = flag("Go on with new records until Ctrl-C.", "--follow", "-f")
    limit: int | None = option("N", "Maximum number of records.", min=1)
    brokers: str | None = _BROKERS
    folder: Path | None = _FOLDER


# -- the command line -----------------------------------------------------------------------

_TOLD = "Moves records from Kafka into SQL databases and topics so that each takes effect once."

app = Commands(
    _TOLD,
    name="oncely",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        import importlib.metadata

        print(f"oncely {importlib.metadata.version('oncely')}")
        raise typer.Exit


@app.callback(help=_TOLD)
def _oncely(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


app.verb(Init, "oncely.cli.plan:propose")
app.verb(Run, "oncely.cli.run:run_files")
app.verb(Work, "oncely.cli.run:work_file")
app.verb(Plan, "oncely.cli.plan:show_plan")
app.verb(Schema, "oncely.cli.verbs:show_schema")
app.verb(Verify, "oncely.cli.audits:verify_file")
app.verb(Status, "oncely.cli.status:show_status")
app.verb(Web, "oncely.cli.web:serve")
app.verb(Top, "oncely.cli.web:top")
app.verb(Audit, "oncely.cli.audits:audit_command")

offsets = app.group("offsets", "Show or reset positions.")
offsets.verb(OffsetsShow, "oncely.cli.repair:show_offsets")
offsets.verb(OffsetsReset, "oncely.cli.repair:reset_offsets")

rejects = app.group("rejects", "List, replay or discard records that could not be written.")
rejects.verb(RejectsList, "oncely.cli.repair:list_rejects")
rejects.verb(RejectsDiscard, "oncely.cli.repair:discard_rejects")
rejects.verb(RejectsReplay, "oncely.cli.repair:replay_rejects")

app.verb(Repair, "oncely.cli.repair:repair_file")
app.verb(Backfill, "oncely.cli.repair:backfill_file")

files = app.group("files", "The files that a pipeline has written, by its manifest.")
files.verb(FilesList, "oncely.cli.files:list_files")
files.verb(FilesPaths, "oncely.cli.files:list_paths")
files.verb(FilesRead, "oncely.cli.files:read_files")
files.verb(FilesVerify, "oncely.cli.files:verify_files")
files.verb(FilesCompact, "oncely.cli.files:compact_files")
files.verb(FilesVacuum, "oncely.cli.files:vacuum_files")

schema = files.group("schema", "The schemas that were inferred, by scope.")
schema.verb(FilesSchemaShow, "oncely.cli.files:show_schemas")
schema.verb(FilesSchemaReset, "oncely.cli.files:reset_scope")

app.verb(Semantics, "oncely.cli.semantics:show_semantics")
app.verb(Torture, "oncely.cli.semantics:torture_app")

local = app.group("local", "A Kafka broker and PostgreSQL on this machine, in the background.")
local.verb(LocalUp, "oncely.cli.local:up")
local.verb(LocalDown, "oncely.cli.local:down")
local.verb(LocalStatus, "oncely.cli.local:status")
local.verb(LocalProduce, "oncely.cli.local:produce")
local.verb(LocalConsume, "oncely.cli.local:consume")


def main() -> None:
    """Run the command line; ends the process with the command's exit code."""
    atexit.register(_leave_out_collection)
    screen.escape_other_characters()
    try:
        app(prog_name="oncely")
    except Exception as error:
        sys.exit(screen.show_error(error, debug=options.log["debug"]))


def show_schema(asked: Schema) -> None:
    """Print the JSON Schema of pipeline files, or their reference."""
    from oncely.config import reference

    schema = json.dumps(reference.json_schema(), indent=2) + "\n"
    sys.stdout.write(reference.markdown() if asked.markdown else schema)


def _leave_out_collection() -> None:
    """Exempt all objects from the collections at the interpreter's exit, which take 0.2 s.

    DuckDB's bindings report objects that are left then.
    """
    if "duckdb" not in sys.modules:
        gc.freeze()
