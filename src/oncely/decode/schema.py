"""Schemas of rows: Spark's DDL to Arrow types and back, and the columns of the parts of a record.

A schema is ``name TYPE [NOT NULL] [COMMENT 'text'], ...`` as ``StructType.toDDL`` prints it. Names
may be any word, including SQL's reserved words, since a schema contains only names and types; other
names are put between backticks, and a backtick inside is doubled.

| DDL                               | Arrow                  | in JSON                   |
|-----------------------------------|------------------------|---------------------------|
| STRING                            | string                 | text; a number or boolean |
| JSON, of a whole column           | string, marked         | anything                  |
| BOOLEAN                           | bool                   | true, false               |
| TINYINT SMALLINT INT BIGINT       | int8 int16 int32 int64 | a number without . and e  |
| FLOAT, DOUBLE                     | float, double          | a number                  |
| DECIMAL(p, s); DECIMAL is (10, 0) | decimal128(p, s)       | a number, or text with it |
| DATE                              | date32                 | text, ISO 8601            |
| TIMESTAMP                         | timestamp(us, UTC)     | text, ISO 8601            |
| TIMESTAMP_NTZ                     | timestamp(us)          | text, ISO 8601, no offset |
| BINARY                            | binary                 | text, base64              |
| ARRAY<T>                          | list<T>                | array                     |
| STRUCT<name: T, ...>              | struct                 | object                    |
| MAP<STRING, T>                    | map<string, T>         | object                    |

BYTE, SHORT, INTEGER, LONG, REAL, DEC, NUMERIC and TIMESTAMP_LTZ are Spark's other names. TEXT,
CHAR(n), CHARACTER(n) and VARCHAR(n) are STRING; their length is not checked, and a database column
that is shorter refuses the row.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pyarrow as pa

from oncely.errors import ConfigError

_SCALARS: dict[str, pa.DataType] = {
    "STRING": pa.string(),
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
    "BINARY": pa.binary(),
}
_NAMES = {arrow: name for name, arrow in _SCALARS.items()}
_OTHER_NAMES = {
    "BYTE": "TINYINT",
    "SHORT": "SMALLINT",
    "INTEGER": "INT",
    "LONG": "BIGINT",
    "REAL": "FLOAT",
    "TIMESTAMP_LTZ": "TIMESTAMP",
}
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")
_TEXTS = ("TEXT", "CHAR", "CHARACTER", "VARCHAR")
_JSON = {b"oncely": b"json"}
_MOST_DIGITS = 38  # of Spark's DECIMAL and Arrow's decimal128
_DEEPEST = 32  # nested types; far below the limit of recursion
_WAY_OUT = (
    "write it as Spark's DDL, such as: id BIGINT NOT NULL, at TIMESTAMP, tags ARRAY<STRING>; "
    "a name that is not one word goes between backticks"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<word>\w+)"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<mark>[<>(),:])|(?P<end>\Z)|(?P<other>.))",
    re.DOTALL,
)


def is_json(field: pa.Field) -> bool:
    """True for a column of type JSON: its texts are JSON values of any kind."""
    return (field.metadata or {}).items() >= _JSON.items()


def as_json(field: pa.Field) -> pa.Field:
    """A column of texts, marked as a column of type JSON."""
    return field.with_metadata({**(field.metadata or {}), **_JSON})


def without_json(schema: pa.Schema) -> pa.Schema:
    """The columns with those of type JSON as plain texts."""
    return pa.schema([one.remove_metadata() if is_json(one) else one for one in schema])


class SchemaKey:
    """A schema as a key: unlike :class:`pyarrow.Schema`, it compares metadata of fields, too."""

    __slots__ = ("_hash", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema, self._hash = schema, hash(schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchemaKey) and same_schema(self.schema, other.schema)

    def __hash__(self) -> int:
        return self._hash


def same_schema(one: pa.Schema | None, other: pa.Schema | None) -> bool:
    """True if two schemas are equal, including the metadata of fields."""
    if one is None or other is None:
        return one is other
    return one is other or bool(one.equals(other, check_metadata=True))


def refuse_other_capitals(schema: pa.Schema, holder: str) -> None:
    """Refuse columns whose names differ in capitals only.

    Args:
        schema: the columns.
        holder: what takes such names for one.

    Raises:
        ConfigError: names the columns.
    """
    spelled: dict[str, str] = {}
    for name in schema.names:
        other = spelled.setdefault(name.lower(), name)
        if other != name:
            raise ConfigError(
                "decode.schema",
                f"the columns {other!r} and {name!r} differ in capitals only, and {holder} takes"
                " them for one",
                way_out="leave one of them out, or give it another name at its producer;"
                " PostgreSQL, Kafka topics and transform.python keep them apart",
            )


def parse_schema(ddl: str, *, key: str = "decode.schema") -> pa.Schema:
    """Read Spark DDL.

    Args:
        ddl: the schema's text.
        key: the key of the pipeline file that errors name.

    Raises:
        ConfigError: it is no DDL, has a column twice, or has a type that Oncely does not support.
    """
    return _Parser(ddl, key).schema()


def type_name(arrow: pa.DataType) -> str:
    """The DDL of a type: ``int32`` is ``INT``."""
    if pa.types.is_decimal(arrow):
        return f"DECIMAL({arrow.precision},{arrow.scale})"
    if pa.types.is_map(arrow):
        return f"MAP<{type_name(arrow.key_type)}, {type_name(arrow.item_type)}>"
    if pa.types.is_list(arrow):
        return f"ARRAY<{type_name(arrow.value_type)}>"
    if pa.types.is_struct(arrow):
        return f"STRUCT<{', '.join(f'{ddl_name(f.name)}: {type_name(f.type)}' for f in arrow)}>"
    return _NAMES.get(arrow, str(arrow))


def ddl_name(name: str) -> str:
    """A column's name in DDL, between backticks if it is not one word."""
    plain = name.isascii() and name.isidentifier()
    return name if plain else "`" + name.replace("`", "``") + "`"


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


class _Parser:
    """Recursive descent over the tokens, with one method for each rule of the grammar."""

    def __init__(self, ddl: str, key: str) -> None:
        self.key = key
        self.tokens = [
            _Token(kind, found[kind], found.start(kind))
            for found in _TOKEN.finditer(ddl)
            if (kind := found.lastgroup) is not None
        ]
        self.next = 0
        self.depth = 0
        for token in self.tokens:
            if token.kind == "other":
                raise self._error(token, f"{token} has no meaning here")

    def schema(self) -> pa.Schema:
        return pa.schema(self._fields("", "the schema"))

    def _error(self, token: _Token, problem: str) -> ConfigError:
        return ConfigError(self.key, f"at character {token.at + 1}: {problem}", way_out=_WAY_OUT)

    @property
    def _ahead(self) -> _Token:
        return self.tokens[self.next]

    def _take(self) -> _Token:
        token = self._ahead
        self.next += token.kind != "end"
        return token

    def _accept(self, *texts: str) -> bool:
        """Consume these words or marks if they come next, ignoring case."""
        ahead = self.tokens[self.next : self.next + len(texts)]
        if [t.text.upper() for t in ahead if t.kind in ("word", "mark")] != [*texts]:
            return False
        self.next += len(texts)
        return True

    def _expect(self, mark: str, after: str = "") -> None:
        if not self._accept(mark):
            raise self._error(self._ahead, f"expected {mark!r}{after}, found {self._ahead}")

    def _fields(self, closing: str, owner: str) -> list[pa.Field]:
        """Fields up to a mark, which is not consumed; without a mark, up to the end."""

        def at_end() -> bool:
            token = self._ahead
            return token.kind == ("mark" if closing else "end") and token.text == closing

        if at_end():
            raise self._error(self._ahead, f"{owner} has no columns")
        fields: dict[str, pa.Field] = {}
        while True:
            first = self._ahead
            field = self._field()
            if field.name in fields:
                raise self._error(first, f"{field.name!r} is repeated")
            fields[field.name] = field
            if at_end():
                return list(fields.values())
            self._expect(",", f" after {field.name!r}")

    def _field(self) -> pa.Field:
        name = self._name()
        self._accept(":")
        json = self._json()
        arrow = pa.string() if json else self._type()
        nullable = not self._accept("NOT", "NULL")
        if self._accept("COMMENT"):
            token = self._take()
            if token.kind != "text":
                raise self._error(token, f"expected a quoted comment, found {token}")
        field = pa.field(name, arrow, nullable=nullable)
        return as_json(field) if json else field

    def _json(self) -> bool:
        """Consume the type JSON, which only a whole column has."""
        token = self._ahead
        if not self._accept("JSON"):
            return False
        if self.depth:
            raise self._error(token, "JSON is the type of a whole column")
        return True

    def _name(self) -> str:
        token = self._take()
        if token.kind == "quoted" and len(token.text) > 2:
            return token.text[1:-1].replace("``", "`")
        if token.kind == "word" and not token.text.isdigit():
            return token.text
        raise self._error(token, f"expected a column's name, found {token}")

    def _type(self) -> pa.DataType:
        token = self._take()
        word = token.text.upper() if token.kind == "word" else ""
        word = _OTHER_NAMES.get(word, word)
        if word in _SCALARS:
            return _SCALARS[word]
        if word in _DECIMALS:
            return self._decimal()
        if word in _TEXTS:
            return self._text()
        if word == "JSON":
            raise self._error(token, "JSON is the type of a whole column")
        nested = {"ARRAY": self._array, "STRUCT": self._struct, "MAP": self._map}.get(word)
        if nested is None:
            known = ", ".join(
                (
                    *_SCALARS,
                    "VARCHAR(n)",
                    "JSON",
                    "DECIMAL(p,s)",
                    "ARRAY<>",
                    "STRUCT<>",
                    "MAP<STRING,>",
                )
            )
            raise self._error(token, f"{token} is not one of the types {known}")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._error(token, f"types are nested more than {_DEEPEST} deep")
        self._expect("<")
        arrow = nested()
        self._expect(">")
        self.depth -= 1
        return arrow

    def _decimal(self) -> pa.DataType:
        digits, scale = 10, 0
        first = self._ahead
        if self._accept("("):
            digits = self._number()
            scale = self._number() if self._accept(",") else 0
            self._expect(")")
        if not 1 <= digits <= _MOST_DIGITS or scale > digits:
            raise self._error(
                first,
                f"DECIMAL({digits},{scale}): takes 1 to {_MOST_DIGITS} digits, "
                "and no more of them after the point than in all",
            )
        return pa.decimal128(digits, scale)

    def _text(self) -> pa.DataType:
        if self._accept("("):
            self._number()
            self._expect(")")
        return pa.string()

    def _number(self) -> int:
        token = self._take()
        if token.kind != "word" or not re.fullmatch("[0-9]{1,4}", token.text):
            raise self._error(token, f"expected a number, found {token}")
        return int(token.text)

    def _array(self) -> pa.DataType:
        return pa.list_(self._type())

    def _struct(self) -> pa.DataType:
        return pa.struct(self._fields(">", "STRUCT"))

    def _map(self) -> pa.DataType:
        first = self._ahead
        if self._type() != pa.string():
            raise self._error(first, "the keys of a MAP are STRING")
        self._expect(",")
        return pa.map_(pa.string(), self._type())


# -- the parts of a record ------------------------------------------------------------------

METADATA_COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "key": pa.string(),
    "headers": pa.string(),
}
"""The parts of a record, in the order of their columns, and the types of the columns."""


class MetadataColumn(NamedTuple):
    """A column.

    Attributes:
        of: a name in :data:`METADATA_COLUMNS`.
        column: the name of the column.
        header: the name of the header, if it is one.
    """

    of: str
    column: str
    header: str = ""

    @property
    def setting(self) -> str:
        """The key of the pipeline file."""
        return f"decode.metadata.{self.of}" + (f".{self.header}" if self.header else "")


RAW_COLUMNS: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}
"""Columns of a raw row. Headers are a list: Kafka keeps their order, and a name may repeat."""


BEYOND_DOUBLE = "oncely.beyond_double"
"""An attribute of ``long``, and a key in the metadata of the Arrow field: the column has held
numbers beyond 2^53 (see :data:`oncely.decode.merging.LARGE`)."""
LARGE_FIELD = {BEYOND_DOUBLE: "true"}
"""The metadata of such an Arrow field."""


def is_large(field: pa.Field) -> bool:
    """True if a BIGINT column has contained numbers beyond 2^53, according to its metadata."""
    return bool(field.metadata) and BEYOND_DOUBLE.encode() in field.metadata


def large(name: str) -> pa.Field:
    """A BIGINT column that has contained numbers beyond 2^53."""
    return pa.field(name, pa.int64(), metadata=LARGE_FIELD)
