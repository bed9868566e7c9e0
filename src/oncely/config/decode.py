"""``[decode]``: the conversion of a record's bytes to columns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

import pyarrow as pa
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from oncely.config.base import (
    PROPERTIES,
    Section,
    as_tuple,
    file_name,
    invalid,
    plain_table,
    shown,
    written,
)
from oncely.decode.schema import (
    METADATA_COLUMNS,
    RAW_COLUMNS,
    MetadataColumn,
    is_json,
    parse_schema,
)
from oncely.errors import ConfigError


def _readable(value: Path) -> Path:
    if not value.is_file():
        raise invalid(f"there is no file {shown(str(value))}", "specify an existing file")
    return value


FileName = Annotated[
    Path,
    BeforeValidator(file_name),
    AfterValidator(_readable),
    PlainSerializer(str, when_used="json"),
]


def _ddl(value: str) -> str:
    try:
        parse_schema(value)
    except ConfigError as error:
        raise invalid(error.problem, error.way_out) from None
    return value


class _Json(Section):
    format: Literal["json"]
    schema_ddl: Annotated[str, AfterValidator(_ddl), Field(alias="schema")]


Unwrap = Annotated[str, Field(min_length=1)] | None

_REGISTRY = re.compile(r"https?://[^\s/@?#]+(/[^\s@]*)?")


def _registry(value: str) -> str:
    if not _REGISTRY.fullmatch(value):
        raise invalid(
            "not a plain URL; allowed: http:// or https://, a host, no login in it",
            'write "https://registry:8081"; the login goes to schema_registry_user_info',
        )
    return value


class _Avro(Section):
    """Avro records.

    Attributes:
        format: the format of the bytes.
        schema_file: the schema of every record, as a file (.avsc); exactly one of schema_file and
            schema_registry.
        schema_registry: URL of a Confluent schema registry; records contain the id of their schema.
        schema_registry_user_info: ``user:password`` for it; never shown.
        schema_registry_ca: PEM file of the authority that signed its certificate.
    """

    format: Literal["avro"]
    schema_file: FileName | None = None
    schema_registry: Annotated[str, AfterValidator(_registry)] | None = None
    schema_registry_user_info: SecretStr | None = None
    schema_registry_ca: FileName | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.schema_file is None) == (self.schema_registry is None):
            raise invalid(
                "needs exactly one of schema_file and schema_registry",
                "schema_file for plain Avro, schema_registry for Confluent's wire format",
            )
        for name in ("schema_registry_user_info", "schema_registry_ca"):
            if getattr(self, name) is not None and self.schema_registry is None:
                raise invalid("has no meaning without schema_registry", "remove it", below=name)
        if self.schema_registry_user_info is not None:
            login = self.schema_registry_user_info.get_secret_value()
            user, colon, _ = login.partition(":")
            if not user or not colon:
                raise invalid(
                    "not a login; allowed: user:password",
                    'write "user:${PASSWORD}"',
                    below="schema_registry_user_info",
                )
        return self


ColumnName = Annotated[str, Field(min_length=1)] | None


@written(PROPERTIES)
def _headers(value: object) -> dict[str, str]:
    """``headers`` of ``[decode.metadata]``: the column of each header."""
    found = plain_table(value)
    bad = [name for name, column in found.items() if not isinstance(column, str) or not column]
    if bad:
        raise invalid(
            f"found {shown(found[bad[0]])}; allowed: the name of a column",
            'write headers.trace = "trace_id"',
            below=bad[0],
        )
    return found


def _record_columns(value: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in value if name not in RAW_COLUMNS]
    if unknown or not value or len(set(value)) != len(value):
        raise invalid(
            f"found {shown(', '.join(value))}; allowed: some of {', '.join(RAW_COLUMNS)}, "
            "each once",
            'write columns = ["key", "value", "timestamp"]',
        )
    return value


def _key_type(value: str) -> str:
    kinds = parse_schema(_ddl(f"x {value}"))
    kind = kinds.field(0)
    if len(kinds) > 1 or pa.types.is_nested(kind.type) or is_json(kind) or not kind.nullable:
        raise invalid(
            f"found {shown(value)}; allowed: a type without other types in it",
            'write type = "BIGINT"',
        )
    return value


class TextKey(Section):
    """``[decode.key]`` with ``format = "string"``: the key's UTF-8 text is one column.

    Attributes:
        format: the format of the bytes.
        column: the name of the column.
        type: the type of the column, which the text spells: ``BIGINT``, ``DATE`` and so on.
        unwrap: the key is a JSON object, and the column is this member of it: ``payload`` for JSON
            with schemas of Kafka Connect.
        json_value: the key is a JSON value: a text in quotes, a number, true or false.
    """

    format: Literal["string"]
    column: Annotated[str, Field(min_length=1)]
    type: Annotated[str, AfterValidator(_key_type)] = "STRING"
    unwrap: Unwrap = None
    json_value: Annotated[bool, Field(alias="json")] = False

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.unwrap is not None and self.json_value:
            raise invalid("a member that is unwrapped is a JSON value", "remove it", below="json")
        return self


class JsonKey(_Json):
    """``[decode.key]`` with ``format = "json"``: an object with these columns.

    Attributes:
        format: the format of the bytes.
        schema_ddl: the columns, as Spark's DDL.
        strict: a STRING takes texts only, and no numbers and booleans.
        unwrap: the member that contains the object with the columns: ``payload`` for JSON with
            schemas of Kafka Connect.
    """

    strict: bool = False
    unwrap: Unwrap = None


class AvroKey(_Avro):
    """``[decode.key]`` with ``format = "avro"``."""


KeySettings = Annotated[JsonKey | AvroKey | TextKey, Field(discriminator="format")]


class MetadataSettings(Section):
    """``[decode.metadata]``: parts of the record, and the names of the columns that they become.

    The columns come after those of value and key.

    Attributes:
        topic: the column of the record's topic, a ``STRING``.
        partition: the column of its partition, an ``INT``.
        offset: the column of its offset, a ``BIGINT``.
        timestamp: the column of its timestamp, a ``TIMESTAMP``.
        key: the column of its key as UTF-8 text, a ``STRING``; a key that is no such text makes
            the record a reject.
        headers: names of headers, and their columns: the value of a header as UTF-8 text; of
            several headers with one name that of the last.
    """

    topic: ColumnName = None
    partition: ColumnName = None
    offset: ColumnName = None
    timestamp: ColumnName = None
    key: ColumnName = None
    headers: Annotated[dict[str, str], BeforeValidator(_headers)] = Field(default_factory=dict)

    @property
    def parts(self) -> tuple[MetadataColumn, ...]:
        """The columns, in their order."""
        single = ((one, getattr(self, one)) for one in METADATA_COLUMNS if one != "headers")
        found = [MetadataColumn(one, column) for one, column in single if column is not None]
        return (
            *found,
            *(MetadataColumn("headers", column, of) for of, column in self.headers.items()),
        )

    @model_validator(mode="after")
    def _columns(self) -> Self:
        if not self.parts:
            raise invalid("names no column", 'write timestamp = "sent_at", or remove the table')
        taken: set[str] = set()
        for part in self.parts:
            if part.column.lower() in taken:
                raise invalid(
                    f"two parts of the record want the column {shown(part.column)}",
                    "give each a name of its own",
                    below=part.setting.removeprefix("decode.metadata."),
                )
            taken.add(part.column.lower())
        return self


INFER = "infer"


def _ddl_or_infer(value: str) -> str:
    return value if value == INFER else _ddl(value)


class JsonDecode(Section):
    """``[decode]`` with ``format = "json"``: each record is an object with these columns.

    Attributes:
        format: the format of the bytes.
        schema_ddl: the columns, as Spark's DDL; or ``infer`` for files, whose columns are inferred
            from the records.
        strict: a STRING takes texts only, and no numbers and booleans.
        unwrap: the member that contains the object with the columns: ``payload`` for JSON with
            schemas of Kafka Connect.
        key: the decoding of the record's key, whose columns come after those of the value.
        metadata: parts of the record that become columns.
    """

    format: Literal["json"]
    schema_ddl: Annotated[str, AfterValidator(_ddl_or_infer), Field(alias="schema")]
    strict: bool = False
    unwrap: Unwrap = None
    key: KeySettings | None = None
    metadata: MetadataSettings | None = None

    @model_validator(mode="after")
    def _inferable(self) -> Self:
        if self.inferred and "strict" in self.model_fields_set:
            raise invalid('has no meaning with schema = "infer"', "remove it", below="strict")
        if self.inferred and self.unwrap is not None:
            raise invalid(
                'schema = "infer" does not unwrap records',
                "name the columns in decode.schema; or let the producer write no schemas:"
                " schemas.enable = false in the converter of Kafka Connect",
                below="unwrap",
            )
        return self

    @property
    def inferred(self) -> bool:
        """True if the columns are inferred from the records."""
        return self.schema_ddl == INFER


class AvroDecode(_Avro):
    """``[decode]`` with ``format = "avro"``.

    Attributes:
        key: the decoding of the record's key, whose columns come after those of the value.
        metadata: parts of the record that become columns.
    """

    key: KeySettings | None = None
    metadata: MetadataSettings | None = None


class RawDecode(Section):
    """``[decode]`` with ``format = "raw"``: the record as Kafka stores it.

    Attributes:
        format: the format of the bytes.
        columns: the parts of the record that become columns: ``key``, ``value``, ``timestamp``,
            ``headers``. Headers are a list of structs of ``key``, a text, and ``value``, bytes.
        key: the decoding of the record's key, whose columns come after those of the value.
        metadata: parts of the record that become columns.
    """

    format: Literal["raw"]
    columns: Annotated[
        tuple[str, ...],
        BeforeValidator(as_tuple),
        AfterValidator(_record_columns),
    ] = ("key", "value", "timestamp")
    key: KeySettings | None = None
    metadata: MetadataSettings | None = None


DecodeSettings = Annotated[JsonDecode | AvroDecode | RawDecode, Field(discriminator="format")]


def key_columns(key: JsonKey | AvroKey | TextKey) -> tuple[str, ...] | None:
    """The columns of a decoded key; None if they depend on its Avro schema."""
    match key:
        case TextKey():
            return (key.column,)
        case JsonKey():
            return tuple(parse_schema(key.schema_ddl).names)
        case AvroKey():
            return None
