"""A pipeline proposed from a sample of a topic's records: formats, schema, key, mode, partitioning.

The proposal is the content of a pipeline file and remarks on its keys, for a person who reads and
changes it. Nothing here reads or writes; :mod:`oncely.pipeline.init` does.

As text it is TOML, with remarks as comments.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from oncely.decode.base import InvalidRecord
from oncely.decode.merging import CannotMerge, type_of
from oncely.decode.reference import Whole, json_text, parse_object, parse_value
from oncely.decode.schema import ddl_name, type_name
from oncely.decode.times import is_too_fine, parse_date, parse_timestamp
from oncely.errors import ConfigError
from oncely.kinds.kind import Kind, Proposed, kind_of, kinds
from oncely.kinds.tables import SOURCE_COLUMNS
from oncely.stores.sql.connection import LONGEST_NAME
from oncely.wording import printable

_NAMED = 8  # columns that a remark names
_VARIES = "JSON"
"""The type of a column whose values have no other type in common."""
_NESTED = ("STRUCT", "ARRAY", _VARIES)
_TIMES = ("DATE", "TIMESTAMP_NTZ", "TIMESTAMP", "STRING")
"""The types of texts; each but STRING takes the texts of those before it."""
_MILLIS_DIGITS = 13
_MONEY = "DECIMAL(18, 2)"
_CENTS = re.compile(r"-?\d{1,16}(?:\.\d\d?)?")
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_LOGICAL = {
    "org.apache.kafka.connect.data.Date": "DATE '1970-01-01' + {}::INTEGER",
    "org.apache.kafka.connect.data.Timestamp": "make_timestamptz({} * 1000)",
    "io.debezium.time.Date": "DATE '1970-01-01' + {}::INTEGER",
    "io.debezium.time.Timestamp": "make_timestamptz({} * 1000)",
    "io.debezium.time.MicroTimestamp": "make_timestamptz({})",
}
"""The time of a number, by the name of its schema."""


class JsonMember(NamedTuple):
    """A member of JSON objects.

    Attributes:
        values: those that are not null.
        type: DDL of a type that holds all of them.
        varies: the reason why the values have no type of their own; empty if they have one.
    """

    values: Sequence[Any]
    type: str
    varies: str

    @property
    def is_millis(self) -> bool:
        """True if all values may be milliseconds since 1970, of the years 2001 to 2286."""
        return all(
            isinstance(one, Whole) and len(one) == _MILLIS_DIGITS and one[0] != "-"
            for one in self.values
        )


@dataclass(frozen=True)
class Records:
    """The sample.

    Attributes:
        keys, values: of each record.
        compacted: the topic keeps the last record of each key.
    """

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    compacted: bool = False

    @cached_property
    def present(self) -> list[bytes]:
        """The values that are not null."""
        return [one for one in self.values if one is not None]

    @cached_property
    def tombstones(self) -> int:
        """The number of records with a key and without a value."""
        both = zip(self.keys, self.values, strict=True)
        return sum(value is None and key is not None for key, value in both)

    @cached_property
    def present_keys(self) -> list[bytes]:
        """The keys that are not null."""
        return [one for one in self.keys if one is not None]

    def with_keys(self, texts: Iterable[str]) -> Records:
        """The same records, with these texts for the keys that are not null."""
        rest = iter(texts)
        return replace(self, keys=[None if k is None else next(rest).encode() for k in self.keys])

    @cached_property
    def logical(self) -> dict[str, str]:
        """By member of wrapped values: the name that its schema of Kafka Connect has."""
        schemas = (one["schema"] for one in self._objects if one and self.wrapped and one["schema"])
        fields = [one for schema in schemas for one in schema.get("fields", [])]
        return {one["field"]: one["name"] for one in fields if one.keys() >= {"field", "name"}}

    @cached_property
    def objects(self) -> list[dict[str, Any] | None]:
        """The value of each record as a JSON object, unwrapped, or None."""
        return [one["payload"] if one and self.wrapped else one for one in self._objects]

    @cached_property
    def members(self) -> dict[str, JsonMember]:
        """The members of the values that are objects."""
        return _members([one for one in self.objects if one is not None])

    @cached_property
    def wrapped(self) -> bool:
        """True if the values are objects in the envelopes of Kafka Connect."""
        found = _payloads([one for one in self._objects if one is not None]) or [None]
        return all(isinstance(one, dict) for one in found)

    @cached_property
    def _objects(self) -> list[dict[str, Any] | None]:
        return [_object(one) for one in self.values]


@dataclass
class Proposal:
    """A pipeline file: its content, and remarks by dotted key, above the key or behind it.

    Attributes:
        keys: the columns of the record's key, if it is decoded.
    """

    raw: dict[str, Any]
    above: dict[str, list[str]] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """The kind of the sink."""
        return kind_of(self.raw["sink"]["kind"])

    @property
    def proposed(self) -> Proposed:
        """What its kind proposes."""
        found = self.kind.proposed
        assert found is not None  # noqa: S101 - for mypy: only such kinds are proposed
        return found

    @property
    def is_table(self) -> bool:
        """True if rows may be upserted, into columns."""
        return "mode" in self.kind.settings.model_fields

    def remark(self, key: str, *lines: str) -> None:
        """Add lines above a key."""
        self.above.setdefault(key, []).extend(lines)


def propose(raw: dict[str, Any], records: Records, registry: str | None) -> Proposal:
    """The proposal for a topic.

    Args:
        raw: name, source and sink.
        records: the sample.
        registry: URL of a schema registry, or None.
    """
    made = Proposal({**raw, "decode": {}})
    _decode(made, records, registry)
    _key(made, records, registry)
    _logical(made, records)
    _mode(made, records)
    made.raw = {name: made.raw[name] for name in ("name", "source", "decode", "transform", "sink")
                if name in made.raw}  # fmt: skip
    return made


# -- the value ---------------------------------------------------------------------------------


def _decode(made: Proposal, records: Records, registry: str | None) -> None:
    present, objects = records.present, [one for one in records.objects if one is not None]
    framed = sum(map(_is_framed, present))
    if objects and 2 * len(objects) >= len(present):
        _json(made, records, len(objects), len(present))
        if records.wrapped and made.raw["decode"]["format"] == "json":
            made.raw["decode"]["unwrap"] = "payload"
            made.behind["decode.unwrap"] = "the values are JSON with schemas of Kafka Connect"
        return
    if registry is not None and 2 * framed > len(present):
        made.raw["decode"] = {"format": "avro", "schema_registry": registry}
        return
    made.raw["decode"] = {"format": "raw"}
    if 2 * framed > len(present):
        made.remark(
            "decode.format",
            f"{framed:,} of {len(present):,} values begin as those of a schema registry do:"
            " `oncely init --registry URL` proposes their columns.",
        )
    elif present and all(map(_is_text, present)):
        made.raw["transform"] = {"sql": "SELECT * REPLACE (decode(value) AS value) FROM input"}
        made.behind["decode.format"] = f"{len(present):,} of {len(present):,} values are text"
    return


def _json(made: Proposal, records: Records, objects: int, values: int) -> None:
    members = records.members
    found = dict(_with_names(made, _columns(members)))
    made.raw["decode"] = {"format": "json", "schema": _schema(found.items())}
    made.behind["decode.format"] = f"{objects:,} of {values:,} values are JSON objects"
    if values > objects:
        made.behind["decode.format"] += "; the others become rejects"
    made.remark(
        "decode.schema", "The types hold all values seen. Widen what may grow; NOT NULL is allowed."
    )
    for name in [name for name, one in members.items() if one.varies][:_NAMED]:
        made.remark("decode.schema", f"{name!r} varies: {members[name].varies}.")
    money = [repr(name) for name in found if members[name].type == _MONEY]
    if money:
        made.remark(
            "decode.schema",
            f"At most two decimals, as money has: {', '.join(money[:_NAMED])}. {_MONEY} keeps them"
            " exactly; a record with more becomes a reject. DOUBLE takes all, and rounds.",
        )
    told = [name for name in found if members[name].is_millis and name not in records.logical]
    for name in told[:_NAMED]:
        column = name.replace('"', '""')
        made.remark(
            "decode.schema",
            f"{name!r} may be milliseconds since 1970, which BIGINT keeps as they are. For a"
            f' TIMESTAMP, in [transform]: sql = \'SELECT * REPLACE (make_timestamptz("{column}" *'
            f' 1000) AS "{column}") FROM input\'',
        )
    left_out = [name for name in members if name not in found]
    if left_out:
        more = f" and {len(left_out) - _NAMED:,} more" if len(left_out) > _NAMED else ""
        names = ", ".join(map(repr, left_out[:_NAMED])) + more
        made.remark(
            "decode.schema",
            f"Left out, always null, no name of a column, or another in capitals: {names}.",
        )
    if not found:
        made.raw["decode"] = {"format": "raw"}
        return
    sink = made.raw["sink"]
    if made.is_table and not set(SOURCE_COLUMNS.names).isdisjoint(name.lower() for name in found):
        sink["keep_source"] = False
        made.behind["sink.keep_source"] = "the values have columns of these names"
    _partitioning(made, found)
    if made.kind.settings.infers:
        made.remark("decode.schema", 'schema = "infer" lets the columns grow with the records.')


def _members(objects: Iterable[dict[str, Any]]) -> dict[str, JsonMember]:
    values: dict[str, list[Any]] = {}
    for one in objects:
        for name, value in one.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return {name: JsonMember(some, *proposed_type(name, some)) for name, some in values.items()}


def proposed_type(name: str, values: Sequence[Any]) -> tuple[str, str]:
    """A type that holds all values of a member, and :attr:`JsonMember.varies`.

    It is the type that a column gets from inference (:mod:`oncely.decode.infer`), unless the values
    contradict each other, are texts that are all dates or times, or may be amounts of money.
    """
    try:
        arrow = type_of(values, name)
    except (CannotMerge, InvalidRecord) as error:
        nested = any(isinstance(one, dict | list) for one in values)
        return _VARIES if nested else "STRING", str(error)
    kind = _VARIES if arrow is None else type_name(arrow)
    if kind == "DOUBLE" and _are_cents(values):
        return _MONEY, ""
    if kind == "STRING":
        return max(map(_kind_of_text, values), key=_TIMES.index), ""
    return _VARIES if "``" in kind else kind, ""  # DDL has no empty names


def _are_cents(values: Sequence[str]) -> bool:
    """True if no number has more than two decimals, and one has two: a DOUBLE has no exact value of
    most of them, and their sums differ."""
    return all(map(_CENTS.fullmatch, values)) and any(one[-3:-2] == "." for one in values)


def _kind_of_text(text: str) -> str:
    if parse_date(text) is not None:
        return "DATE"
    if is_too_fine(text):  # a TIMESTAMP would not keep all digits
        return "STRING"
    if parse_timestamp(text, zoned=False) is not None:
        return "TIMESTAMP_NTZ"
    return "STRING" if parse_timestamp(text, zoned=True) is None else "TIMESTAMP"


def _columns(members: dict[str, JsonMember]) -> Iterator[tuple[str, str]]:
    """Name and type of each member that has a name and a value."""
    for name, one in members.items():
        if one.values and name:
            yield name, one.type


def _with_names(made: Proposal, found: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Without names that no table can have, and those that differ from an earlier one in capitals
    alone: no database has both."""
    taken = set[str]()
    for name, kind in found:
        if name.lower() not in taken and made.proposed.fits(name):
            taken.add(name.lower())
            yield name, kind


def _schema(found: Iterable[tuple[str, str]]) -> str:
    text = ",\n".join(f"{ddl_name(name)} {kind}" for name, kind in found) + "\n"
    return text.replace("$$", "$$$$").replace("${", "$${")


def _logical(made: Proposal, records: Records) -> None:
    """Columns of a converter's numbers of days, milliseconds and microseconds become times."""
    casts, members = [], records.members
    for name, kind in records.logical.items():
        cast = _LOGICAL.get(kind)
        if cast and name not in made.keys and name in members and members[name].type == "BIGINT":
            column = '"' + name.replace('"', '""') + '"'
            casts.append(f"{cast.format(column)} AS {column}")
        elif kind == _DECIMAL:
            made.remark(
                "decode.schema",
                f"{name!r} is a Decimal of Kafka Connect, whose bytes have the form of Base64. For"
                ' numbers: "value.converter.decimal.format" = "NUMERIC" at the connector.',
            )
    if casts and made.raw["decode"]["format"] == "json":
        made.raw["transform"] = {"sql": f"SELECT * REPLACE ({', '.join(casts)}) FROM input"}


def _partitioning(made: Proposal, found: dict[str, str]) -> None:
    if columns := made.proposed.partition_by(found):
        made.raw["sink"]["partition_by"] = columns
        if not made.is_table:
            made.behind["sink.partition_by"] = "event time, UTC"


# -- the key -----------------------------------------------------------------------------------


def _key(made: Proposal, records: Records, registry: str | None) -> None:
    keys = records.present_keys
    if not keys:
        return
    if registry is not None and all(map(_is_framed, keys)):
        made.raw["decode"]["key"] = {"format": "avro", "schema_registry": registry}
        return
    objects = [_object(one) for one in keys]
    payloads = _payloads(objects)
    given = objects if payloads is None else payloads
    whole = [one for one in given if isinstance(one, dict)]
    found = dict(_columns(_members(whole)))
    unwrap = {} if payloads is None else {"unwrap": "payload"}
    if found and len(whole) == len(records.keys) and _are_keys(made, found, records):
        made.raw["decode"]["key"] = {"format": "json", "schema": _schema(found.items()), **unwrap}
        made.keys = tuple(found)
    elif payloads is not None and not any(isinstance(one, dict | list) for one in payloads):
        texts = [one if isinstance(one, str) else json_text(one) for one in payloads]
        _text_key(made, records.with_keys(texts), unwrap)
    elif all(quoted := [_in_quotes(one) for one in keys]):
        _text_key(made, records.with_keys(quoted), {"json": True})
    elif all(map(_is_text, keys)):
        _text_key(made, records, {})


def _are_keys(made: Proposal, found: dict[str, str], records: Records) -> bool:
    """True if all columns can be compared, and differ from those of the value or are the same."""
    of_value = {name.lower(): (name, kind) for name, kind in _columns(records.members)}
    return dict(_with_names(made, found.items())) == found and all(
        not kind.startswith(_NESTED) and of_value.get(name.lower(), (name, kind)) == (name, kind)
        for name, kind in found.items()
    )


def _text_key(made: Proposal, records: Records, more: dict[str, Any]) -> None:
    decode, members = made.raw["decode"], records.members
    if decode["format"] == "raw":
        decode["columns"], members = ["value", "timestamp"], {}
    same = [name for name, one in members.items() if _is_key(name, one, records)]
    taken = {name.lower() for name in members}
    names = ("key", "record_key", "kafka_key", *(f"key_{n}" for n in range(len(taken))))
    free = [name for name in names if name not in taken]
    made.keys = ((same or free)[0],)
    decode["key"] = {"format": "string", "column": made.keys[0], **more}
    if same and members[same[0]].type == "BIGINT":
        decode["key"]["type"] = "BIGINT"
    if same:
        made.behind["decode.key.column"] = "the key and this column of the value are the same"


def _is_key(name: str, member: JsonMember, records: Records) -> bool:
    """True if a text or whole number of every value is also its record's key."""
    texts = [one and one.get(name) for one in records.objects]
    return member.type in ("STRING", "BIGINT") and all(
        key is not None and isinstance(text, str) and text.encode() == key
        for key, value, text in zip(records.keys, records.objects, texts, strict=True)
        if value is not None
    )


# -- the sink ----------------------------------------------------------------------------------


def _mode(made: Proposal, records: Records) -> None:
    sink, names = made.raw["sink"], made.keys
    repeated = len(records.present_keys) - len({*records.present_keys})
    if "key" in made.kind.settings.model_fields:
        if len(names) == 1:
            sink["key"] = names[0]
        elif made.raw["decode"]["format"] == "raw":
            sink["key"] = "key"
        return
    if not made.is_table or not names:
        return
    replaces = [f"{records.tombstones:,} records without a value"] if records.tombstones else []
    replaces += ["a compacted topic"] if records.compacted else []
    if replaces and len(records.present_keys) == len(records.keys):
        sink["mode"], sink["keys"] = "upsert", names
        made.remark("sink.mode", f"The last record of a key counts: {' in '.join(replaces)}.",
                    'mode = "append" keeps every record instead.')  # fmt: skip
    elif repeated:
        made.remark(
            "sink.mode",
            f"{repeated:,} of {len(records.keys):,} records repeat a key. If a record replaces the"
            " earlier ones of its key:",
            'mode = "upsert"',
            f"keys = {toml(names)}",
        )


def sink_of(to: str | None, topic: str) -> dict[str, Any]:
    """The sink that ``--to`` names; by default a file of SQLite.

    Raises:
        ConfigError: it names none.
    """
    to = f"sqlite:///{table_of(topic)}.db" if to is None else to
    named = [
        (len(prefix), kind.name, kind.proposed)
        for kind in kinds()
        if kind.proposed is not None
        for prefix in kind.proposed.prefixes
        if to.startswith(prefix)
    ]
    _, name, proposed = max(named, default=(0, "", None))
    found = None if proposed is None else proposed.sink(to, topic, table_of(topic))
    if found is None:
        raise ConfigError(
            "--to",
            f"found {to!r}; allowed: sqlite:///FILE, postgresql://…, topic:NAME, a folder,"
            " delta:FOLDER",
            way_out="write ./folder for files, delta:./folder for a Delta table, topic:name for a"
            " topic",
        )
    return {"kind": name, **found}


def table_of(topic: str) -> str:
    """A table's name that needs no quotes."""
    name = re.sub(r"[^a-z0-9_]", "_", topic.lower())
    return (f"t_{name}" if name[0].isdigit() else name)[:LONGEST_NAME]


# -- bytes -------------------------------------------------------------------------------------


def _object(data: bytes | None) -> dict[str, Any] | None:
    try:
        return parse_object(data)
    except InvalidRecord:
        return None


def _in_quotes(data: bytes) -> str:
    """The text that JSON has in quotes; empty if it is another value."""
    try:
        found = parse_value(data, "key")
    except InvalidRecord:
        return ""
    return found if type(found) is str else ""


def _payloads(objects: Sequence[dict[str, Any] | None]) -> list[Any] | None:
    """The payloads of JSON with schemas of Kafka Connect; None if an object has another form."""
    if all(one and one.keys() == {"schema", "payload"} for one in objects) and all(
        one is not None and isinstance(one["schema"], dict | None) for one in objects
    ):
        return [one["payload"] for one in objects if one is not None]
    return None


def _is_framed(data: bytes) -> bool:
    """True for Confluent's wire format: a zero, and the schema's id in four bytes."""
    return len(data) > 5 and data[0] == 0


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


_WIDTH = 88
_BEHIND = 36  # the column of comments behind a value
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_NAMES = re.compile(r"`(?:``|[^`])*`")


def written(
    raw: Mapping[str, Any],
    head: Sequence[str] = (),
    above: Mapping[str, Sequence[str]] | None = None,
    behind: Mapping[str, str] | None = None,
) -> str:
    """The text of a pipeline file.

    Args:
        raw: its content.
        head: lines of a comment at the top.
        above: comments above a key, by the dotted key.
        behind: comments behind a value, by the dotted key.
    """
    lines = [f"# {printable(one)}" for one in head]
    lines += ["", *_table(raw, "", above or {}, behind or {})]
    return "\n".join(lines) + "\n"


def _table(
    table: Mapping[str, Any],
    path: str,
    above: Mapping[str, Sequence[str]],
    behind: Mapping[str, str],
) -> Iterator[str]:
    for name, value in table.items():
        if not isinstance(value, Mapping):
            key = f"{path}{name}"
            for one in above.get(key, ()):
                yield from _comment(one)
            yield _behind(f"{_table_key(name)} = {toml(value)}", behind.get(key))
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from ("", f"[{path}{name}]")
            yield from _table(value, f"{path}{name}.", above, behind)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent="# ", subsequent_indent="#   "
    ) or ["#"]


def _behind(setting: str, remark: str | None) -> str:
    return setting if remark is None else f"{setting:<{_BEHIND - 1}} # {printable(remark)}"


def _table_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def toml(value: object) -> str:
    """A value as TOML writes it; a text with line breaks over several lines.

    Not with line breaks in a quoted name: its lines would look like those of the file.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
    text = str(value)
    if "\n" not in text or any("\n" in one for one in _NAMES.findall(text)):
        return _quoted(text)
    return '"""\n' + "\n".join(_quoted(line)[1:-1] for line in text.split("\n")) + '"""'


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
