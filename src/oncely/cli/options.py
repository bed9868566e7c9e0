"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from oncely.cli import logs
from oncely.errors import ConfigError, WrongInput

debugging = False
json_logs = False


class LogFormat(StrEnum):
    """The format of log entries on stderr."""

    TEXT = "text"
    JSON = "json"


def _debug(value: bool) -> bool:
    global debugging  # noqa: PLW0603 - main() reads it when a command has failed
    debugging = value
    logs.configure(debug=value, as_json=json_logs)
    return value


def _log_format(value: LogFormat) -> LogFormat:
    global json_logs  # noqa: PLW0603 - the callback of --debug may be called later, or earlier
    json_logs = value is LogFormat.JSON
    logs.configure(debug=debugging, as_json=json_logs)
    return value


File = Annotated[
    Path,
    typer.Argument(help="The pipeline file (TOML); - for standard input.", metavar="FILE"),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_debug, help="Log every step; show tracebacks."),
]
LogLinesFormat = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        callback=_log_format,
        help="json: one object a line on stderr (docs/metrics.md).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
HttpAddress = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="Serve /livez, /readyz and /metrics there (docs/probes.md);"
        " without a host for this machine only.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve metrics for Prometheus there (docs/metrics.md), without the probes of --http.",
    ),
]
PollingTtl = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="/livez fails without a look for records for longer; 5 minutes."
    ),
]
ConsumingTtl = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="/livez fails without a commit for longer, if there are records; 1 minute.",
    ),
]
EventFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Append events to this file, as JSON lines (docs/events.md); in a folder to a file"
        " for each pipeline.",
    ),
]
SparkLogFile = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="File for Spark's own output; - for stderr.", dir_okay=False),
]


def assigned(option: str, texts: Iterable[str] | None) -> dict[str, str]:
    """``KEY=VALUE`` texts as a mapping.

    Raises:
        ConfigError: one of them has no equals sign.
    """
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(option, "needs KEY=VALUE", way_out=f"write {option} key=value")
        found[key.strip()] = value
    return found


def refuse_without(needed: str, **given: object) -> None:
    """Refuse options that mean nothing without another one.

    Raises:
        WrongInput: names the first.
    """
    for name, value in given.items():
        if value is not None:
            raise WrongInput(f"--{name.replace('_', '-')} needs {needed}")
