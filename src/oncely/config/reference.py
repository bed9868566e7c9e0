"""The pipeline file as JSON Schema and as a page, generated from the types of its settings.

Both come from :func:`json_schema`: types, defaults and limits are those of the settings, meanings
are the docstrings of their classes.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from oncely.config.base import Section, form_of
from oncely.config.pipeline import PipelineSettings, SettingsTable, keys, tables
from oncely.config.problems import example
from oncely.kafka.properties import ACCEPTED as SOURCE_PROPERTIES
from oncely.kafka.properties import PRODUCER_ACCEPTED as PRODUCER_PROPERTIES

_ATTRIBUTE = re.compile(r"    (\w+(?:, \w+)*): (.+)")
_OF_TABLE = re.compile(r"`\[[\w.]+\]`(?: with `\w+ = \"\w+\"`)?[:.] ?")
_ORDER = ("", "source", "decode", "filter", "transform", "sink", "offsets", "spark", "worker")
_ROLE = re.compile(r"(?:,|\.)? [Ss]ee :\w+:`[^`]*`")
_PROPERTIES: Mapping[str, Collection[str]] = {
    "source.kafka": SOURCE_PROPERTIES,
    "sink.kafka": PRODUCER_PROPERTIES,
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of pipeline files, for editors."""
    schema = PipelineSettings.model_json_schema(schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, "title": "Pipeline file of Oncely", **schema}


class _Generator(GenerateJsonSchema):
    """Adds the forms of values, meanings and examples to pydantic's own generator."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        form = form_of(schema["function"]["function"])
        if form is None:
            return self.generate_inner(schema["schema"])
        return {**form.schema, "title": form.type}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        found = self.generate_inner(schema["schema"])
        default = _default(schema)
        return found if default is None else {**found, "default": default}

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])  # TOML has no null

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        found = super().tagged_union_schema(schema)
        found.pop("discriminator", None)  # a word of OpenAPI
        return found

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        found = super().literal_schema(schema)
        if "const" in found:
            return found
        return {"anyOf": [found, {"type": "string", "pattern": r"\$\{"}]}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        section = typing.cast("type[Section]", schema["cls"])
        name, table, tag = _place(section)
        found["description"] = _summary(section)
        found.pop("title", None)
        texts = meanings(section)
        for key, one in found["properties"].items():
            if not one.get("oneOf") and "$ref" not in one and "const" not in one:
                one["title"] = one.get("title") or _type(one)
            one["description"] = texts.get(key, "") + _names(f"{name}.{key}")
            if (value := _example(name, key, tag, one)) is not None:
                one["examples"] = [value]
        if table.selector:  # in one section it has a default, and may not be left out
            required = found.setdefault("required", [])
            found["required"] = [table.selector, *(k for k in required if k != table.selector)]
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _names(dotted: str) -> str:
    """The names of the properties that a table accepts, as a sentence."""
    found = sorted(_PROPERTIES.get(dotted, ()))
    return f" Names: {', '.join(f'`{one}`' for one in found)}." if found else ""


def _default(schema: core_schema.WithDefaultSchema) -> object:
    """The default as it is written in the file; None if there is none, or nothing to write."""
    value, inner = schema.get("default"), schema["schema"]
    if value is None or value == ():
        return None
    while inner["type"] == "nullable":
        inner = inner["schema"]
    form = form_of(inner["function"]["function"]) if inner["type"] == "function-before" else None
    if form is not None:
        return form.shown(value)
    return list(value) if isinstance(value, tuple) else value


def _place(section: type[Section]) -> tuple[str, SettingsTable, str]:
    """The name of a section's table, the table, and the value of its selector."""
    for name, table in tables().items():
        for tag, one in table.sections.items():
            if one is section:
                return name, table, tag
    raise LookupError(section)


def meanings(section: type[Section]) -> dict[str, str]:
    """The meaning of each key, from the docstrings of the section and its bases."""
    spelled = {field_name: field.alias or field_name
               for field_name, field in section.model_fields.items()}  # fmt: skip
    found: dict[str, str] = {}
    for one in reversed(section.__mro__):
        if one is not Section and issubclass(one, Section):
            found |= dict(_attributes(one))
    return {spelled[name]: text for name, text in found.items() if name in spelled}


def _attributes(section: type[Section]) -> Iterator[tuple[str, str]]:
    """Names and texts of the part "Attributes" of a docstring."""
    _, _, part = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")
    part = re.sub(r"\n {8,}", " ", part)
    for names, text in _ATTRIBUTE.findall(part):
        for name in names.split(", "):
            yield name, _plain(text)


def _summary(section: type[Section]) -> str:
    text, _, _ = inspect.cleandoc(section.__doc__ or "").partition("\n\n")
    return _plain(_OF_TABLE.sub("", _plain(" ".join(text.split())), count=1))


def _plain(text: str) -> str:
    """A text of a docstring as Markdown, a sentence."""
    text = re.sub("``(.+?)``", r"`\1`", _ROLE.sub("", text))
    return text[:1].upper() + text[1:]


def _example(table: str, key: str, tag: str, schema: Mapping[str, Any]) -> object:
    """A value for a key: one of a list, or the other choice, or the default."""
    dotted = f"{table}.{key}".lstrip(".")
    line = example(dotted, tag)
    if "const" in schema:
        return schema["const"]
    if "=" in line and not line.startswith("["):
        return tomllib.loads(line)[key]
    if choices := _choices(schema):
        return next((one for one in choices if one != schema.get("default")), None)
    if isinstance(schema.get("default"), bool):
        return not schema["default"]
    return schema.get("default")


def _choices(schema: Mapping[str, Any]) -> list[str]:
    return [one for part in schema.get("anyOf", ()) for one in part.get("enum", ())]


_TYPES = {"string": "text", "boolean": "true or false", "integer": "whole number",
          "number": "number", "object": "table"}  # fmt: skip


def _type(schema: Mapping[str, Any]) -> str:
    """The name of a type of JSON Schema."""
    if choices := _choices(schema):
        return ", ".join(f"`{one}`" for one in choices)
    if schema.get("type") == "array":
        return "list of texts"
    name = _TYPES[schema["type"]]
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{name}, {low:,} to {high:,}"
    return f"{name}, {low:,} or more" if low is not None else name


def markdown() -> str:
    """The reference of the pipeline file as Markdown, from headings of the second level on."""
    schema = json_schema()
    parts = []
    for name, table in sorted(tables().items(), key=lambda one: _rank(one[0])):
        for tag, section in table.sections.items():
            at = schema["$defs"][section.__name__] if name else schema
            parts.append(_section(name, table, tag, at, keys(section)))
    return "\n".join(parts)


def _rank(table: str) -> int:
    top = table.partition(".")[0]
    return _ORDER.index(top) if top in _ORDER else len(_ORDER)


def _anchor(table: str, tag: str) -> str:
    return "-".join(filter(None, (table.replace(".", "-") or "top", tag)))


def _section(
    name: str,
    table: SettingsTable,
    tag: str,
    schema: Mapping[str, Any],
    present: Mapping[str, object],
) -> str:
    title = f"`[{name}]`" if name else "The top of the file"
    if tag:
        title += f' with `{table.selector} = "{tag}"`'
    anchor = _anchor(name, tag)
    lines = [f"\n## {title} {{ #{anchor} }}\n", schema["description"], ""]
    for key in sorted(present, key=lambda one: one != table.selector):
        lines += _key(f"{anchor}-{key}", key, schema)
        if below := tables().get(f"{name}.{key}".lstrip(".")):
            lines += [_links(f"{name}.{key}".lstrip("."), below), ""]
    return "\n".join(lines)


def _links(name: str, table: SettingsTable) -> str:
    """Links to the forms of a table."""
    forms = {tag: f"`{table.selector} = {toml(tag)}`" if tag else f"`[{name}]`"
             for tag in table.sections}  # fmt: skip
    return "Keys: " + ", ".join(f"[{text}](#{_anchor(name, tag)})" for tag, text in forms.items())


def _key(anchor: str, key: str, section: Mapping[str, Any]) -> list[str]:
    one = section["properties"][key]
    facts = [f"`{toml(one['const'])}`" if "const" in one else one.get("title", "table")]
    if key in section.get("required", ()):
        facts.append("required")
    elif "default" in one:
        facts.append(f"default `{toml(one['default'])}`")
    lines = [f"### `{key}` {{ #{anchor} }}\n", f"*{', '.join(facts)}*\n", one["description"], ""]
    for value in one.get("examples", ()):
        lines += ["```toml", f"{key} = {toml(value)}", "```", ""]
    return lines


def toml(value: object) -> str:
    """A value as TOML."""
    match value:
        case Mapping():
            inner = (f"{json.dumps(name)} = {toml(one)}" for name, one in value.items())
            return f"{{ {', '.join(inner)} }}"
        case list() | tuple():
            return f"[{', '.join(toml(one) for one in value)}]"
        case bool() | str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return f"{value:_}" if isinstance(value, int) else str(value)
