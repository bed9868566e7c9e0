"""A decoder from plain arguments: what the pipeline file says under ``decode``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oncely.decode.avro import AvroDecoder, avro_decoder
from oncely.decode.avro_schema import Definition
from oncely.decode.base import Decoder
from oncely.decode.json import JsonDecoder
from oncely.decode.key import PLAIN_FORMATS, PlainKey, WithKey
from oncely.decode.raw import RawDecoder
from oncely.decode.registry import Registry, UnknownSchema
from oncely.decode.schema import parse_schema
from oncely.errors import ConfigError

Format = Literal["json", "avro", "raw"]
RegistrySettings = str | Mapping[str, Any]
"""A URL, or a table of ``url`` and the settings of confluent-kafka's SchemaRegistryClient."""


@dataclass(frozen=True)
class KeySpec:
    """How to decode the records' keys.

    Attributes:
        format: ``json``, ``avro``, or a plain value: ``string``, ``long``, ``int``, ``raw``.
        schema: json: DDL. avro: as for the value.
        name: the column's name, when the key is one value: all plain formats need it, and avro
            when its schema is no record.
        schema_registry: avro: as for the value.
    """

    format: str
    schema: str | None = None
    name: str | None = None
    schema_registry: RegistrySettings | None = field(default=None, repr=False)


def build_decoder(
    format: str,
    schema: str | None = None,
    *,
    schema_registry: RegistrySettings | None = None,
    topics: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    key: KeySpec | None = None,
    base: Path | None = None,
) -> Decoder:
    """Make the decoder of a pipeline. With a registry and no schema it asks for the latest one.

    Args:
        format: ``json``, ``avro`` or ``raw``.
        schema: json: Spark DDL. avro: a path to a schema file (.avsc), or its JSON itself.
        schema_registry: avro: values are in Confluent's wire format. Without ``schema`` the rows
            have the columns of the newest schema of subject ``<topic>-value`` (key:
            ``<topic>-key``), which must be the same columns for all ``topics``.
        topics: the topics that are read.
        columns: raw: which columns, see :data:`oncely.decode.raw.RAW_COLUMNS`.
        key: how to decode keys, if at all.
        base: the folder that a relative path of a schema file begins in.

    Raises:
        ConfigError: a key is missing, not for this format, or has a value that can't work.
        Unavailable: the registry doesn't answer.
    """
    source = _Source("value", "decode", tuple(topics), base)
    if format == "raw":
        source.refuse(format, schema=schema, schema_registry=schema_registry)
        value: Decoder = RawDecoder() if columns is None else RawDecoder(tuple(columns))
    else:
        source.refuse(format, columns=columns)
        value = source.structured(format, schema, schema_registry, "", ("json", "avro", "raw"))
    return value if key is None else WithKey(value, _key(key, tuple(topics), base))


def _key(spec: KeySpec, topics: tuple[str, ...], base: Path | None) -> Decoder:
    source = _Source("key", "decode.key", topics, base)
    for plain in PLAIN_FORMATS:
        if spec.format == plain:
            source.refuse(plain, schema=spec.schema, schema_registry=spec.schema_registry)
            if not spec.name:
                raise ConfigError(
                    "decode.key.name",
                    f"a key of format {plain!r} needs the name of its column",
                    way_out='add name = "…" under [decode.key]',
                )
            return PlainKey(plain, spec.name)
    known = ("json", "avro", *PLAIN_FORMATS)
    if spec.format == "json":
        source.refuse("json", name=spec.name)
    return source.structured(spec.format, spec.schema, spec.schema_registry, spec.name or "", known)


@dataclass(frozen=True)
class _Source:
    """Whose bytes, and where in the pipeline file they are described."""

    column: Literal["value", "key"]
    path: str
    topics: tuple[str, ...]
    base: Path | None

    def refuse(self, format_: str, **given: object) -> None:
        """Settings that mean nothing for a format are mistakes, not decoration."""
        for name, setting in given.items():
            if setting is not None:
                raise ConfigError(
                    f"{self.path}.{name}",
                    f"has no meaning with format {format_!r}",
                    way_out="remove it, or change the format",
                )

    def structured(
        self,
        format_: str,
        schema: str | None,
        schema_registry: RegistrySettings | None,
        name: str,
        known: Sequence[str],
    ) -> Decoder:
        if format_ == "json":
            self.refuse("json", schema_registry=schema_registry)
            if not schema:
                problem = "format 'json' needs the columns"
                way_out = 'schema = "id BIGINT NOT NULL, at TIMESTAMP"'
                raise ConfigError(f"{self.path}.schema", problem, way_out=way_out)
            return JsonDecoder(parse_schema(schema, key=f"{self.path}.schema"), self.column)
        if format_ == "avro":
            return self._avro(schema, schema_registry, name)
        problem = f"{format_!r} is not one of {', '.join(known)}"
        raise ConfigError(f"{self.path}.format", problem)

    def _avro(
        self, schema: str | None, settings: RegistrySettings | None, name: str
    ) -> AvroDecoder:
        registry = None
        if settings is not None:
            settings = {"url": settings} if isinstance(settings, str) else settings
            registry = Registry(settings, f"{self.path}.schema_registry")
        if schema:
            return self._made(Definition(self._text(schema)), registry, name)
        if registry is None:
            raise ConfigError(
                f"{self.path}.schema",
                "format 'avro' needs a schema file or a schema registry",
                way_out='schema = "flights.avsc" for bare datums, '
                'schema_registry = "http://…" for Confluent\'s wire format',
            )
        return self._latest(registry, name)

    def _made(self, of: Definition, registry: Registry | None, name: str) -> AvroDecoder:
        key = f"{self.path}.schema"
        return avro_decoder(of, registry=registry, column=self.column, name=name, key=key)

    def _text(self, schema: str) -> str:
        if schema.lstrip()[:1] in ("{", "[", '"'):
            return schema
        file = Path(schema) if self.base is None else self.base / schema
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"can't read the schema file {schema}: {error}"
            raise ConfigError(f"{self.path}.schema", problem) from None

    def _latest(self, registry: Registry, name: str) -> AvroDecoder:
        way_out = f"give {self.path}.schema, the path of a schema file (.avsc)"
        decoders: dict[str, AvroDecoder] = {}
        for topic in self.topics:
            subject = f"{topic}-{self.column}"
            try:
                decoders[subject] = self._made(registry.latest(subject), registry, name)
            except UnknownSchema as error:
                raise ConfigError(f"{self.path}.schema", str(error), way_out=way_out) from None
        if not decoders:
            raise ConfigError(f"{self.path}.schema", "without topics no subject", way_out=way_out)
        (subject, first), *others = decoders.items()
        for other, decoder in others:
            if decoder.schema != first.schema:
                problem = f"subjects {subject} and {other} have different columns"
                raise ConfigError(f"{self.path}.schema", problem, way_out=way_out)
        return first
