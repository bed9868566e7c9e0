"""The reference of the Python API (``docs/api.md``), from the docstrings of its public names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import oncely

MODULES = ("oncely.audit", "oncely.context", "oncely.files", "oncely.jobs", "oncely.testing")
"""Modules whose names are public, too."""
SPECIAL = ("__bool__", "__iter__", "__len__", "__getitem__")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Its wrapper raises):")
_ITEM = re.compile(r"(\*?\w[\w.]*(?:, \*?\w[\w.]*)*): (.*)", re.DOTALL)


def markdown() -> str:
    """The whole reference."""
    parts = [_name(f"oncely.{name}", getattr(oncely, name)) for name in oncely.__all__]
    parts.append("## Values inside results\n\nTheir classes are not for import.\n")
    parts += [f"### {one.__name__}\n\n{_class(one, one.__name__)}" for one in inside()]
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## The module {name}\n\n{text(inspect.getdoc(module))}")
        parts += [_name(f"{name}.{one}", getattr(module, one)) for one in names(module)]
    return "\n" + "\n".join(parts)


def names(module: ModuleType) -> list[str]:
    """The public names of a module: those of ``__all__``, or those that it defines."""
    defined = [
        name
        for name, one in vars(module).items()
        if getattr(one, "__module__", "") == module.__name__
        and not name.startswith("_")
        and not isinstance(one, TypeVar | ParamSpec)
    ]
    return getattr(module, "__all__", defined)


def inside() -> list[type]:
    """The classes of the fields of results, and of the fields of these."""
    public = [getattr(oncely, name) for name in oncely.__all__]
    found, new = set[type](), [one for one in public if inspect.isclass(one)]
    while new:
        kind = new.pop()
        for annotation in _fields(kind).values():
            for name in re.findall(r"\w+", annotation):
                one = getattr(sys.modules[kind.__module__], name, None)
                if inspect.isclass(one) and _fields(one) and {one} - found - {*public}:
                    found.add(one)
                    new.append(one)
    return sorted(found, key=lambda one: one.__name__)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines: an inherited one is of a class
    that is not for users."""
    for name, value in [*vars(kind).items()]:  # a model adds to them when it is asked
        given = getattr(value, "func", value)  # of a cached property
        known = isinstance(given, property | classmethod | staticmethod) or inspect.isroutine(given)
        made = name == "__init__" and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))
        special = name.startswith("_") and name not in (*SPECIAL, "__init__")
        if known and not made and not special:
            yield name, given


def signature(value: Any) -> inspect.Signature:
    """The signature of a function, a method or a property; annotations are as they are written."""
    value = getattr(value, "__func__", value)
    return inspect.signature(value.fget if isinstance(value, property) else value)


def _name(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        own = [one for one in vars(value).values() if inspect.isclass(one)]
        kinds = [one for one in own if one.__module__ == value.__name__]
        parts = [f"### {name}.{one.__name__}\n\n{_class(one, one.__name__)}" for one in kinds]
        return "\n".join([f"## {name}\n\n{text(inspect.getdoc(value))}", *parts])
    if inspect.isclass(value):
        return f"## {name}\n\n{_class(value, name.rpartition('.')[2])}" + "\n".join(
            f"### {name}.{one}\n\n{_called(one, it)}{text(inspect.getdoc(it))}"
            for one, it in members(value)
            if not one.startswith(("_", "model_"))
        )
    if callable(value) and not hasattr(value, "__args__"):
        return (
            f"## {name}\n\n{_called(name.rpartition('.')[2], value)}{text(inspect.getdoc(value))}"
        )
    return f"## {name}\n\nA type: `{_plain(value)}`\n"


def _fields(kind: type) -> dict[str, str]:
    """The fields of a data class or named tuple, and their types."""
    if "__dataclass_fields__" in vars(kind):
        fields = dataclasses.fields(kind)
        return {one.name: _plain(one.type) for one in fields if not one.name.startswith("_")}
    if issubclass(kind, tuple):
        return {name: _plain(one) for name, one in inspect.get_annotations(kind).items()}
    return {}


def _class(kind: type, name: str) -> str:
    told = text(inspect.getdoc(kind))
    if fields := _fields(kind):
        given = "\n".join(f"    {name}: {one}" for name, one in fields.items())
        return f"```text\n{name}:\n{given}\n```\n\n{told}"
    if "__init__" in vars(kind) and not issubclass(kind, BaseException):
        return _called(name, vars(kind)["__init__"]) + told
    return told


def _called(name: str, value: Callable[..., Any] | property) -> str:
    """A function as it is called, or a property and its type."""
    shown = signature(value)
    back = _plain(shown.return_annotation)
    if isinstance(value, property):
        return f"```text\n{name}: {back}\n```\n\n"
    given = [_argument(one) for one in shown.parameters.values() if one.name not in ("self", "cls")]
    first = next(
        (one.name for one in shown.parameters.values() if one.kind is one.KEYWORD_ONLY), ""
    )
    if first and not any(one.startswith("*") for one in given):
        at = next(n for n, one in enumerate(given) if one.partition(":")[0] == first)
        given.insert(at, "*")
    told = "" if back in ("", "None") else f" -> {back}"
    line = f"{name}({', '.join(given)}){told}"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in given) + f"){told}"
    return f"```text\n{line}\n```\n\n"


def _argument(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {_plain(one.annotation)}"
    known = isinstance(one.default, str | int | float | tuple | None)
    default = "" if one.default is one.empty else f" = {one.default!r}" if known else " = …"
    return f"{stars}{one.name}{kind}{default}"


def _plain(annotation: Any) -> str:
    """A type as its users write it."""
    if annotation is inspect.Signature.empty:
        return ""
    given = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:oncely|collections|typing|pathlib)(?:\.[a-z_]\w*)*\.(?=[A-Z])", "", given)


def text(docstring: str | None) -> str:
    """A docstring as Markdown: its sections are lists, its blocks are code."""
    parts = list[str]()
    for part in (docstring or "").split("\n\n"):
        if parts and parts[-1].startswith("    ") and part.startswith("    "):
            parts[-1] += f"\n\n{part}"  # a block of code with an empty line
        else:
            parts.append(part)
    return "\n\n".join(map(_part, parts)) + "\n\n"


def _part(part: str) -> str:
    if part.startswith("    "):
        return f"```python\n{textwrap.dedent(part)}\n```"
    part = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", part)
    part = re.sub(r"``([^`]+)``", r"`\1`", part)
    head, _, rest = part.partition("\n")
    section = _SECTION.fullmatch(head)
    if section is None:
        return part
    items = re.split(r"\n(?! )", textwrap.dedent(rest))
    title = {"Args": "Arguments"}.get(section[1], section[1])
    return f"{title}:\n\n" + "\n".join(_item(" ".join(one.split())) for one in items)


def _item(line: str) -> str:
    named = _ITEM.fullmatch(line)
    return f"- `{named[1]}`: {named[2]}" if named else f"- {line}"
