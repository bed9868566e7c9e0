"""Commands of Typer whose options may be fields of dataclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import typer

from oncely.cli.options import Debug

Verb = TypeVar("Verb", bound=Callable[..., int | None])
_ONLY = inspect.Parameter.KEYWORD_ONLY


class Commands(typer.Typer):
    """A group of commands.

    Args:
        told: its help text.
        settings: of :class:`typer.Typer`.
    """

    def __init__(self, told: str, **settings: Any) -> None:
        super().__init__(help=told, no_args_is_help=True, **settings)

    def group(self, name: str, told: str) -> Commands:
        """A new group inside this one."""
        inner = Commands(told)
        self.add_typer(inner, name=name)
        return inner

    def verb(self, name: str | None = None) -> Callable[[Verb], Verb]:
        """Register a function as a command, by default of the function's name.

        A parameter whose type is a dataclass stands for the options of its fields. ``--debug`` is
        added as the last option. The function returns the exit code; None is 0.
        """

        def registered(function: Verb) -> Verb:
            self.command(name)(_expanded(function))
            return function

        return registered


def _expanded(function: Callable[..., int | None]) -> Callable[..., None]:
    """The function with the signature that Typer reads."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    types = {one.name: one.annotation for one in own}
    groups = {
        name: one for name, one in types.items() if isinstance(one, type) and is_dataclass(one)
    }

    @functools.wraps(function)
    def called(*, debug: bool, **given: Any) -> None:  # noqa: ARG001 - its callback has it
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        if code := function(**given):
            raise typer.Exit(code)

    parameters: list[inspect.Parameter] = []
    for one in own:
        given = _options(groups[one.name]) if one.name in groups else [one.replace(kind=_ONLY)]
        parameters += given
    parameters.append(inspect.Parameter("debug", _ONLY, default=False, annotation=Debug))
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _options(group: type[Any]) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for one in fields(group):
        yield inspect.Parameter(one.name, _ONLY, default=one.default, annotation=types[one.name])
