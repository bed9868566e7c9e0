"""Options that several commands have, and groups of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer

from oncely.cli import logs
from oncely.errors import ConfigError

log: dict[str, Any] = {"debug": False, "log_format": "text", "log_level": None}
"""The arguments of :func:`oncely.cli.logs.configure`: callbacks are called in any order."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _logs(parameter: typer.CallbackParam, value: Any) -> Any:
    log[str(parameter.name)] = value
    logs.configure(**log)
    return value


def option(metavar: str, told: str) -> typer.models.OptionInfo:
    """An option with a value; its name is that of the parameter."""
    made: typer.models.OptionInfo = typer.Option(metavar=metavar, help=told)
    return made


def flag(name: str, told: str) -> typer.models.OptionInfo:
    """An option without a value."""
    made: typer.models.OptionInfo = typer.Option(name, help=told)
    return made


File = Annotated[
    Path,
    typer.Argument(help="The pipeline file (TOML); - for standard input.", metavar="FILE"),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_logs, help="Log every step; show tracebacks."),
]
Level = Annotated[
    LogLevel | None,
    typer.Option("--log-level", callback=_logs, help="Log from this level on; info."),
]
AsJson = Annotated[bool, flag("--json", "Print JSON for programs.")]
AllowHost = Annotated[
    list[str] | None,
    option("NAME", "Another name under which the HTTP server is reached; may be repeated."),
]
Execute = Annotated[bool, flag("--execute", "Do it.")]
EventFile = Annotated[
    Path | None,
    option(
        "PATH",
        "Append events to this file, as JSON lines (docs/events.md); in a folder to a file"
        " for each pipeline.",
    ),
]
SparkLogFile = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="File for Spark's own output; - for stderr.", dir_okay=False),
]


@dataclass(frozen=True)
class Serving:
    """What a run serves by HTTP, and the format of its log."""

    http: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "Serve /livez, /readyz and /metrics there (docs/probes.md);"
            " without a host for this machine only.",
        ),
    ] = None
    polling_ttl: Annotated[
        str | None, option("TIME", "/livez fails without a look for records for longer; 5 minutes.")
    ] = None
    consuming_ttl: Annotated[
        str | None,
        option("TIME", "/livez fails without a commit for longer, if there are records; 1 minute."),
    ] = None
    metrics: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "Serve metrics for Prometheus there (docs/metrics.md), without the probes of --http.",
        ),
    ] = None
    allow_host: AllowHost = None
    log_format: Annotated[
        LogFormat,
        typer.Option(callback=_logs, help="json: one object a line on stderr (docs/metrics.md)."),
    ] = "text"


@dataclass(frozen=True)
class ResetTo:
    """The verbs of a reset, of which one is given."""

    to_earliest: Annotated[bool, typer.Option("--to-earliest")] = False
    to_latest: Annotated[bool, typer.Option("--to-latest")] = False
    to_offset: Annotated[int | None, typer.Option(metavar="N")] = None
    to_datetime: Annotated[str | None, option("TIME", "ISO 8601; UTC without an offset.")] = None
    shift_by: Annotated[int | None, option("N", "Forward, or backward when negative.")] = None
    by_duration: Annotated[str | None, option("PnDTnHnMnS", "Duration before now: PT1H30M.")] = None


@dataclass(frozen=True)
class WhichRejects:
    """The conditions of rejects."""

    reason: Annotated[
        str | None,
        option("TEXT", "Only rejects with this text in the reason."),
    ] = None
    partition: Annotated[
        list[str] | None, option("TOPIC[:0,1]", "Only of these partitions; may be repeated.")
    ] = None
    since: Annotated[
        str | None, option("TIME", "Only of records at or after it (UTC), or no older: 12h.")
    ] = None
    before: Annotated[
        str | None, option("TIME", "Only of records before it (UTC), or older: 90d.")
    ] = None


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


# -- commands ------------------------------------------------------------------------------


Verb = TypeVar("Verb", bound=Callable[..., int | None])
_ONLY = inspect.Parameter.KEYWORD_ONLY


class Commands(typer.Typer):
    """A group of commands.

    Args:
        told: its help text.
        prefix: the begin of the names of the variables that set options.
        settings: of :class:`typer.Typer`.
    """

    def __init__(self, told: str, prefix: str = "ONCELY", **settings: Any) -> None:
        super().__init__(help=told, no_args_is_help=True, **settings)
        self.prefix = prefix

    def group(self, name: str, told: str) -> Commands:
        """A new group inside this one."""
        inner = Commands(told, f"{self.prefix}_{name.upper()}")
        self.add_typer(inner, name=name)
        return inner

    def verb(self, name: str | None = None) -> Callable[[Verb], Verb]:
        """Register a function as a command, by default of the function's name.

        A parameter whose type is a dataclass stands for the options of its fields. ``--log-level``
        and ``--debug`` are added as the last options. A variable sets each option, but for those
        that permit a loss. The function returns the exit code; None is 0.
        """

        def registered(function: Verb) -> Verb:
            prefix = f"{self.prefix}_{(name or function.__name__).upper()}"
            self.command(name)(_expanded(function, prefix))
            return function

        return registered


def _expanded(function: Callable[..., int | None], prefix: str) -> Callable[..., None]:
    """The function with the signature that Typer reads."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    types = {one.name: one.annotation for one in own}
    groups = {
        name: one for name, one in types.items() if isinstance(one, type) and is_dataclass(one)
    }

    @functools.wraps(function)
    def called(*, log_level: Any, debug: bool, **given: Any) -> None:  # noqa: ARG001 - callbacks
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        if code := function(**given):
            raise typer.Exit(code)

    parameters: list[inspect.Parameter] = []
    for one in own:
        given = _options(groups[one.name]) if one.name in groups else [one.replace(kind=_ONLY)]
        parameters += given
    parameters.append(inspect.Parameter("log_level", _ONLY, default=None, annotation=Level))
    parameters.append(inspect.Parameter("debug", _ONLY, default=False, annotation=Debug))
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_with_variable(one, prefix) for one in parameters]
    )
    return called


_TYPED = ("execute", "erase", "force", "token")
"""Parameters of options that must be typed; ONCELY_WEB_TOKEN is the token itself."""


def _with_variable(parameter: inspect.Parameter, prefix: str) -> inspect.Parameter:
    """An option with the variable that sets it, named after command and option."""
    kind, info = get_args(parameter.annotation)
    if not isinstance(info, typer.models.OptionInfo) or parameter.name in _TYPED:
        return parameter
    given = [str(one) for one in (info.default, *(info.param_decls or ()))]  # Typer takes either
    name = next((one for one in given if one.startswith("--")), parameter.name).partition("/")[0]
    made = copy(info)
    made.envvar = f"{prefix}_{name.strip('-').replace('-', '_').upper()}"
    return parameter.replace(annotation=Annotated[kind, made])


def _options(group: type[Any]) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for one in fields(group):
        yield inspect.Parameter(one.name, _ONLY, default=one.default, annotation=types[one.name])
