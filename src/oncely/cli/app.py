"""The commands: which function does the work of which verb, and the start of the command line."""

from __future__ import annotations

import atexit
import gc
import json
import sys
from typing import Annotated

import typer

from oncely.cli import options, screen, verbs
from oncely.cli.options import Commands

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


app.verb(verbs.Init, "oncely.cli.plan:propose")
app.verb(verbs.Run, "oncely.cli.run:run_files")
app.verb(verbs.Work, "oncely.cli.run:work_file")
app.verb(verbs.Plan, "oncely.cli.plan:show_plan")
app.verb(verbs.Schema, "oncely.cli.app:show_schema")
app.verb(verbs.Verify, "oncely.cli.audit:verify_file")
app.verb(verbs.Status, "oncely.cli.status:show_status")
app.verb(verbs.Web, "oncely.cli.web:serve")
app.verb(verbs.Top, "oncely.cli.top:top")
app.verb(verbs.Audit, "oncely.cli.audits:audit_command")

offsets = app.group("offsets", "Show or reset positions.")
offsets.verb(verbs.OffsetsShow, "oncely.cli.offsets:show_offsets")
offsets.verb(verbs.OffsetsReset, "oncely.cli.offsets:reset_offsets")

rejects = app.group("rejects", "List, replay or discard records that could not be written.")
rejects.verb(verbs.RejectsList, "oncely.cli.rejects:list_rejects")
rejects.verb(verbs.RejectsDiscard, "oncely.cli.rejects:discard_rejects")
rejects.verb(verbs.RejectsReplay, "oncely.cli.rejects:replay_rejects")

app.verb(verbs.Repair, "oncely.cli.repair:repair_file")
app.verb(verbs.Backfill, "oncely.cli.repair:backfill_file")

files = app.group("files", "The files that a pipeline has written, by its manifest.")
files.verb(verbs.FilesList, "oncely.cli.files:list_files")
files.verb(verbs.FilesPaths, "oncely.cli.files:list_paths")
files.verb(verbs.FilesRead, "oncely.cli.files:read_files")
files.verb(verbs.FilesVerify, "oncely.cli.files:verify_files")
files.verb(verbs.FilesCompact, "oncely.cli.files:compact_files")
files.verb(verbs.FilesVacuum, "oncely.cli.files:vacuum_files")

schema = files.group("schema", "The schemas that were inferred, by scope.")
schema.verb(verbs.FilesSchemaShow, "oncely.cli.files:show_schemas")
schema.verb(verbs.FilesSchemaReset, "oncely.cli.files:reset_scope")

app.verb(verbs.Semantics, "oncely.cli.semantics:show_semantics")
app.verb(verbs.Torture, "oncely.cli.torture:torture_app")

local = app.group("local", "A Kafka broker and PostgreSQL on this machine, in the background.")
local.verb(verbs.LocalUp, "oncely.cli.local:up")
local.verb(verbs.LocalDown, "oncely.cli.local:down")
local.verb(verbs.LocalStatus, "oncely.cli.local:status")
local.verb(verbs.LocalProduce, "oncely.cli.local_topics:produce")
local.verb(verbs.LocalConsume, "oncely.cli.local_topics:consume")


def main() -> None:
    """Run the command line; ends the process with the command's exit code."""
    atexit.register(_leave_out_collection)
    screen.escape_other_characters()
    try:
        app(prog_name="oncely")
    except Exception as error:
        sys.exit(screen.show_error(error, debug=options.log["debug"]))


def show_schema(asked: verbs.Schema) -> None:
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
