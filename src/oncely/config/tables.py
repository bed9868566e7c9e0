"""The tables of the pipeline file, found by a walk over the types of its settings."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from oncely.config.base import Section
from oncely.config.pipeline import PipelineSettings
from oncely.config.sink import ByKind


class SettingsTable(NamedTuple):
    """A table of the file.

    Attributes:
        selector: the key that selects among the sections, such as ``kind``; empty if there is one.
        sections: its forms, by the value of the selector; by an empty text if there is one.
    """

    selector: str
    sections: Mapping[str, type[Section]]


@cache
def tables() -> Mapping[str, SettingsTable]:
    """Every table by its dotted name, in the order of the file; the top of the file has none."""
    return dict(_below("", SettingsTable("", {"": PipelineSettings})))


def keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of a section in the file's spelling, with the fields that hold them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _below(name: str, table: SettingsTable) -> Iterator[tuple[str, SettingsTable]]:
    yield name, table
    done: set[str] = set()
    for section in table.sections.values():
        for key, field in keys(section).items():
            found = _table(field)
            if found is not None and key not in done:
                done.add(key)
                yield from _below(f"{name}.{key}".lstrip("."), found)


def _table(field: FieldInfo) -> SettingsTable | None:
    """The table that a field holds, if it holds one."""
    by_kind = any(isinstance(one, ByKind) for one in field.metadata)
    annotation = ByKind.annotation() if by_kind else field.annotation
    found = {one: None for one in _types(annotation) if issubclass(one, Section)}
    if not found:
        return None
    selector = _selector(field) or _selector_within(annotation)
    return SettingsTable(selector, {_value(one, selector): one for one in found})


def _types(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _types(inner)


def _selector(field: FieldInfo) -> str:
    return field.discriminator if isinstance(field.discriminator, str) else ""


def _selector_within(annotation: Any) -> str:
    """The selector of ``Annotated[A | B, Field(discriminator=…)] | None``."""
    for inner in (annotation, *typing.get_args(annotation)):
        for one in getattr(inner, "__metadata__", ()):
            if isinstance(one, FieldInfo) and (found := _selector(one)):
                return found
    return ""


def _value(section: type[Section], selector: str) -> str:
    if not selector:
        return ""
    value: str = typing.get_args(section.model_fields[selector].annotation)[0]
    return value
