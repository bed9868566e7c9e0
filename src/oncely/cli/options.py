"""Options that are fields of dataclasses, and the commands that have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, dataclass, field, fields
from pkgutil import resolve_name
from re import findall
from typing import Any, Literal, NamedTuple, dataclass_transform, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from oncely.cli import screen

log: dict[str, Any] = {"debug": False, "log_format": "text", "log_level": None}
"""The arguments of :func:`oncely.cli.screen.configure`: callbacks are called in any order."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def log_changes(parameter: typer.CallbackParam, value: Any) -> Any:
    """The callback of the options of the log."""
    log[str(parameter.name)] = value
    screen.configure(**log)
    return value


def option(
    metavar: str | None, told: str | None, *names: str, default: Any = None, **more: Any
) -> Any:
    """An option with a value, as a field of :class:`Options`.

    Args:
        metavar: what stands for the value.
        told: its help text.
        names: by default that of the field.
        default: ``...``: it is required.
        more: limits, and further arguments of :func:`typer.Option`.
    """
    return typer.Option(default, *names, metavar=metavar, help=told, **more)


def flag(told: str | None, *names: str, default: bool | None = False, **more: Any) -> Any:
    """An option without a value, as a field of :class:`Options`; see :func:`option`."""
    return typer.Option(default, *names, help=told, **more)


def argument(metavar: str, told: str, default: Any = ...) -> Any:
    """An argument, as a field of :class:`Options`; see :func:`option`."""
    return typer.Argument(default, metavar=metavar, help=told)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """The options of a verb as a value: a subclass is a frozen dataclass.

    A field whose type is such a class stands for the options of its fields.
    """

    def __init_subclass__(cls) -> None:
        for name, one in list(vars(cls).items()):
            if isinstance(one, ParameterInfo):
                default = MISSING if one.default is ... else one.default
                setattr(cls, name, field(default=default, metadata={"info": one}))
        dataclass(frozen=True, kw_only=True)(cls)


class Reporting(Options):
    """The options of a verb whose result programs can read."""

    as_json: bool = flag("Print JSON for programs.", "--json")


class Logging(Options):
    """The last options of each verb."""

    log_level: LogLevel | None = option(None, "Log from this level on; info.", callback=log_changes)
    debug: bool = flag("Log every step; show tracebacks.", callback=log_changes)


class Result(NamedTuple):
    """What a verb has found.

    Attributes:
        as_json: makes JSON-able values for programs.
        show: prints it for people.
        code: the exit code.
    """

    as_json: Callable[[], Any]
    show: Callable[[], object]
    code: int = 0

    def print(self, *, as_json: bool) -> int:
        """Print it; returns the exit code."""
        if as_json:
            screen.show_json(self.as_json())
        else:
            self.show()
        return self.code


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

    def verb(self, options: type[Any], work: str) -> None:
        """Register a command: its help is the docstring of its options, its name the last word of
        their class.

        ``--log-level`` and ``--debug`` are added as the last options. A variable sets each option,
        but for those that permit a loss.

        Args:
            options: a subclass of :class:`Options`.
            work: ``module:function``, which is imported when the command runs. It gets the options,
                and returns a :class:`Result` or the exit code; None is 0.
        """
        name = findall("[A-Z][a-z]*", options.__name__)[-1].lower()

        def called(**given: Any) -> None:
            done = resolve_name(work)(_made(options, given))
            code = done.print(as_json=given["as_json"]) if isinstance(done, Result) else done
            if code:
                raise typer.Exit(code)

        prefix = f"{self.prefix}_{name.upper()}"
        parameters = (*_parameters(options, prefix), *_parameters(Logging, prefix))
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.command(name, help=options.__doc__)(called)


_TYPED = ("execute", "erase", "force", "token")
"""Fields of options that must be typed; ONCELY_WEB_TOKEN is the token itself."""


def _parameters(options: type[Any], prefix: str) -> Iterator[inspect.Parameter]:
    """The signature that Typer reads, ``--json`` last; variables are named after command and
    option."""
    types = get_type_hints(options)
    for one in sorted(fields(options), key=lambda one: one.name == "as_json"):
        if _is_group(kind := types[one.name]):
            yield from _parameters(kind, prefix)
            continue
        info = copy(one.metadata["info"])
        if isinstance(info, OptionInfo):
            info.param_decls = info.param_decls or (f"--{one.name.replace('_', '-')}",)
            name = next(decl for decl in info.param_decls if decl.startswith("--"))
            if one.name not in _TYPED:
                variable = name.partition("/")[0].strip("-").replace("-", "_").upper()
                info.envvar = f"{prefix}_{variable}"
        yield inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind
        )


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)


def _made(options: type[Any], given: dict[str, Any]) -> Any:
    types = get_type_hints(options)
    return options(**{
        one.name: _made(kind, given) if _is_group(kind := types[one.name]) else given[one.name]
        for one in fields(options)
    })  # fmt: skip
