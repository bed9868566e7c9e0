"""``oncely audit``: its options. The work is done in :mod:`oncely.cli.audits`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oncely.cli.options import AllowHost, AsJson, flag, option


@dataclass(frozen=True)
class Asked:
    """The options of an audit."""

    file: Annotated[
        Path | None,
        typer.Argument(
            help="The pipeline file (- for standard input), or a TOML file with [left] and"
            " [right].",
            metavar="[FILE]",
        ),
    ] = None
    left: Annotated[
        str | None,
        option(
            "SPEC", "A topic or dataset, such as kafka:orders?brokers=HOST:9092 or parquet:/path."
        ),
    ] = None
    right: Annotated[
        str | None,
        option(
            "SPEC",
            "The dataset that should have its records,"
            " such as 'jdbc:postgresql://HOST/DB?dbtable=orders'.",
        ),
    ] = None
    id: Annotated[str | None, option("EXPR", "Compare by this Spark SQL expression.")] = None
    id_left: Annotated[str | None, option("EXPR", "The id on the left.")] = None
    id_right: Annotated[str | None, option("EXPR", "The id on the right.")] = None
    by: Annotated[str | None, option("EXPR", "Count by group, such as hour(ts).")] = None
    source_columns: Annotated[
        str | None, option("TOPIC,PARTITION,OFFSET", "Compare by these columns of the right side.")
    ] = None
    keyed: Annotated[bool, flag("--keyed", "The right side keeps one row of each id.")] = False
    conf: Annotated[
        list[str] | None, option("KEY=VALUE", "A setting of Spark; may be repeated.")
    ] = None
    since: Annotated[str | None, option("TIME", "Only records from this time on.")] = None
    until: Annotated[
        str | None,
        option("TIME", "Compare only records before this time: ISO 8601; UTC without an offset."),
    ] = None
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of findings of each kind to show.")
    ] = 50
    download: Annotated[
        bool,
        flag(
            "--download",
            "Read every file of a files sink or Delta table again, and compare its rows.",
        ),
    ] = False
    html: Annotated[Path | None, option("PATH", "Write the report as a page.")] = None
    watch: Annotated[
        bool,
        flag(
            "--watch",
            "Audit again and again; with --until, until all records up to that time are proved.",
        ),
    ] = False
    every: Annotated[str, option("SECONDS", "Time between two audits.")] = "60"
    timeout: Annotated[str | None, option("SECONDS", "End a watch after this time.")] = None
    metrics: Annotated[
        str | None, option("HOST:PORT", "Serve the state of a watch to Prometheus.")
    ] = None
    allow_host: AllowHost = None
    as_json: AsJson = False

    @property
    def match(self) -> dict[str, str | None]:
        """How rows and records are compared: by expressions or columns, by option."""
        names = ("id", "id_left", "id_right", "by", "source_columns")
        return {name: getattr(self, name) for name in names}
