"""``oncely audit``: its options. The work is done in :mod:`oncely.cli.audits`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncely.cli.options import AsJson, Debug


def _option(names: str, metavar: str, told: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(names, metavar=metavar, help=told)
    return option


def _flag(name: str, told: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, help=told)
    return option


Text = str | None

File = Annotated[
    Path | None,
    typer.Argument(
        help="The pipeline file (- for standard input), or a TOML file with [left] and [right].",
        metavar="[FILE]",
    ),
]
Left = Annotated[
    Text,
    _option(
        "--left",
        "SPEC",
        "A topic or dataset, such as kafka:orders?brokers=HOST:9092 or parquet:/path.",
    ),
]
Right = Annotated[
    Text,
    _option(
        "--right",
        "SPEC",
        "The dataset that should have its records,"
        " such as 'jdbc:postgresql://HOST/DB?dbtable=orders'.",
    ),
]
Id = Annotated[Text, _option("--id", "EXPR", "Compare by this Spark SQL expression.")]
IdLeft = Annotated[Text, _option("--id-left", "EXPR", "The id on the left.")]
IdRight = Annotated[Text, _option("--id-right", "EXPR", "The id on the right.")]
By = Annotated[Text, _option("--by", "EXPR", "Count by group, such as hour(ts).")]
SourceColumns = Annotated[
    Text,
    _option(
        "--source-columns",
        "TOPIC,PARTITION,OFFSET",
        "Compare by these columns of the right side.",
    ),
]
Keyed = Annotated[bool, _flag("--keyed", "The right side keeps one row of each id.")]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="A setting of Spark; may be repeated."),
]
Since = Annotated[Text, _option("--since", "TIME", "Only records from this time on.")]
Until = Annotated[
    Text,
    _option(
        "--until", "TIME", "Compare only records before this time: ISO 8601; UTC without an offset."
    ),
]
Limit = Annotated[
    int, typer.Option(min=1, metavar="N", help="Number of findings of each kind to show.")
]
Download = Annotated[
    bool,
    _flag("--download", "Read every file of a files sink or Delta table again, and compare its"
          " rows."),
]  # fmt: skip
Html = Annotated[Path | None, _option("--html", "PATH", "Write the report as a page.")]
Junit = Annotated[Path | None, _option("--junit", "PATH", "Write the report as JUnit XML.")]
Watch = Annotated[
    bool,
    _flag("--watch", "Audit again and again; with --until, until all records up to that time are"
          " proved."),
]  # fmt: skip
Every = Annotated[str, _option("--every", "SECONDS", "Time between two audits.")]
Timeout = Annotated[Text, _option("--timeout", "SECONDS", "End a watch after this time.")]
Metrics = Annotated[
    Text, _option("--metrics", "HOST:PORT", "Serve the state of a watch to Prometheus.")
]


def audit(
    file: File = None,
    left: Left = None,
    right: Right = None,
    id_: Id = None,
    id_left: IdLeft = None,
    id_right: IdRight = None,
    by: By = None,
    source_columns: SourceColumns = None,
    keyed: Keyed = False,
    conf: Conf = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    download: Download = False,
    html: Html = None,
    junit: Junit = None,
    watch: Watch = False,
    every: Every = "60",
    timeout: Timeout = None,
    metrics: Metrics = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Compare a pipeline's topics with its destination, offset by offset; or any two datasets.

    Writes nothing. The pipeline may run meanwhile. Trusts nothing of it: topic and destination are
    read again. With --left and --right the records of any pipeline are compared, by id or by the
    offsets in its rows.

    Exit codes: 0 clean; 1 damaged; 4 not all could be proved; 2 wrong input.
    """
    from oncely.cli.audits import Asked, audit_command

    match = {"id": id_, "id_left": id_left, "id_right": id_right, "by": by}
    asked = Asked(
        file, left, right, match | {"source_columns": source_columns}, keyed, tuple(conf or ()),
        since, until, limit, html, junit, as_json, watch, every, timeout, metrics, download,
    )  # fmt: skip
    raise typer.Exit(audit_command(asked))
