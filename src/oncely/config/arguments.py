"""Checks the arguments of the public functions: a wrong one is refused before anything happens.

An annotation refuses nothing in Python, and most wrong values would have a meaning: a text is true
where ``execute`` is asked for, and is a sequence of topics.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from oncely.config.base import shown
from oncely.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Rule(NamedTuple):
    """The values that an argument may have.

    Attributes:
        allows: true for them.
        named: their names for an error.
    """

    allows: Callable[[Any], bool]
    named: str


def one_of(*values: object) -> Rule:
    """One of these values."""
    allowed = [(type(one), one) for one in values]
    return Rule(lambda it: (type(it), it) in allowed, " or ".join(map(repr, values)))


def _made(name: str) -> Rule:
    """An object of a class of this name, which is not imported for that."""
    return Rule(lambda it: name in {one.__name__ for one in type(it).__mro__}, f"of type {name}")


def _count(it: object) -> bool:
    return isinstance(it, int) and not isinstance(it, bool) and it >= 0


def _list_of(rule: Rule, named: str) -> Rule:
    def allows(it: Any) -> bool:
        of = isinstance(it, Sequence) and not isinstance(it, str | bytes)
        return of and all(map(rule.allows, it))

    return Rule(allows, named)


_CALLED = Rule(callable, "a function")
_COUNT = Rule(_count, "a number from 0 on")
_PATH = Rule(lambda it: isinstance(it, str | os.PathLike), "a path")
_TEXT = Rule(lambda it: isinstance(it, str), "a text")
_TEXTS = _list_of(_TEXT, 'a list of texts, as in ["one"]')
_YES = one_of(True, False)
_RULES: Mapping[str, Rule] = {
    "until": one_of("latest"),
    "on_fenced": one_of("end", "wait"),
    "stop": _made("StopSignal"),
    "http": _made("Http"),
    "spark": _made("SparkSession"),
    "verb": _made("Verb"),
    "which": _made("RejectFilter"),
    "listener": _CALLED,
    "progress": _CALLED,
    "events": _PATH,
    "path": _PATH,
    "checkpoint": _PATH,
    "execute": _YES,
    "discarded": _YES,
    "create": _YES,
    "use_spark": _YES,
    "sample": _COUNT,
    "limit": _COUNT,
    "max_removed": _COUNT,
    "topics": _TEXTS,
    "keys": _TEXTS,
    "name": _TEXT,
    "key": _TEXT,
    "df": Rule(lambda it: hasattr(it, "isStreaming"), "a streaming DataFrame"),
    "raw": Rule(lambda it: isinstance(it, Mapping), "a mapping, as a TOML file has"),
    "ranges": Rule(
        lambda it: (
            isinstance(it, Mapping) and all(_made("OffsetRange").allows(one) for one in it.values())
        ),
        "a mapping of TopicPartition to OffsetRange",
    ),
    "before": _made("datetime"),
    "download": _YES,
    "logs": _list_of(_PATH, "a list of paths"),
    "found": _list_of(_made("Finding"), "a list of the findings of an audit"),
}
"""By name: an argument has the same meaning in all functions. None is allowed where it is the
default."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which refuses wrong arguments.

    Its wrapper raises:
        ConfigError: names the argument, and what it may be.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            rule, none = _RULES.get(name), signature.parameters[name].default is None
            if rule is None or (none and value is None) or rule.allows(value):
                continue
            raise ConfigError(
                name,
                f"found {shown(value)}; allowed: {rule.named}{' or None' * none}",
                way_out=f"correct the argument of {function.__qualname__}",
            )
        return function(*args, **kwargs)

    return wrapped
