"""A writer's and a reader's Avro schema, compiled to one function that reads a datum.

Avro 1.11, "Schema Resolution". Values are what :class:`oncely.decode.columns.Columns` takes:
records are lists in the reader schema's order, maps are dicts, instants microseconds, dates days,
decimals Decimal.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

from oncely.decode.avro_binary import (
    PRIMITIVES,
    Corrupt,
    Reader,
    array,
    enum,
    failing,
    fixed,
    mapped,
    mapping,
    record,
    union,
)
from oncely.decode.avro_schema import INSTANTS, LOCALS, TIMES, AvroSchema, Node, NoSchema

_UNITS = {**INSTANTS, **LOCALS, **TIMES}
_EXACT = Context(prec=38)  # the most digits that a decimal here has

_PROMOTIONS: dict[tuple[str, str], Callable[[Any], Any] | None] = {
    ("int", "long"): None,
    ("int", "float"): float,
    ("int", "double"): float,
    ("long", "float"): float,
    ("long", "double"): float,
    ("float", "double"): None,
    ("string", "bytes"): str.encode,
    ("bytes", "string"): bytes.decode,
}


class Incompatible(Exception):
    """The writer's schema can't be read as the reader's."""


def compile_reader(writer: AvroSchema, reader: AvroSchema) -> Reader:
    """Compile a function that reads what ``writer`` wrote as ``reader`` wants it.

    ``reader`` has passed :func:`oncely.decode.avro_schema.to_arrow`: no unions of several types,
    nothing that holds itself.

    Raises:
        Incompatible: no datum could ever be read.
    """
    return _Compiler(writer, reader).read(writer.root, reader.root)


class _Compiler:
    """Walks both schemas together; ``wanted`` None means: read it and throw it away."""

    def __init__(self, writer: AvroSchema, reader: AvroSchema) -> None:
        self.writer, self.reader = writer, reader
        self.thrown_away: dict[str, list[Reader]] = {}

    def read(self, written: Any, wanted: Any | None) -> Reader:
        node = self.writer.node(written)
        if node.kind == "union":
            return self._union(node, wanted)
        if wanted is None:
            return self._skip(node)
        target, nullable = self.reader.nullable(wanted)
        if node.kind == "null":
            if not nullable:
                raise Incompatible(f"null is no {target.kind}")
            return PRIMITIVES["null"]
        return self._match(node, target)

    def _union(self, node: Node, wanted: Any | None) -> Reader:
        return union([self._branch(member, wanted) for member in node.attributes["members"]])

    def _branch(self, member: Any, wanted: Any | None) -> Reader:
        try:
            return self.read(member, wanted)
        except Incompatible as error:  # only a datum that takes this branch is lost
            return failing(str(error))

    def _match(self, node: Node, target: Node) -> Reader:
        pair = node.kind, target.kind
        if pair[0] != pair[1] and pair not in _PROMOTIONS:
            raise Incompatible(f"{node.kind} is no {target.kind}")
        if node.kind == "record":
            return self._record(node, target)
        if node.kind == "enum":
            return self._enum(node, target)
        if node.kind == "array":
            return array(self.read(node.attributes["items"], target.attributes["items"]))
        if node.kind == "map":
            return mapping(self.read(node.attributes["values"], target.attributes["values"]))
        if node.kind == "fixed":
            _same_name(node, target)
            if node.attributes["size"] != target.attributes["size"]:
                raise Incompatible(f"{node.name} has another size")
        read = self._plain(node)
        if pair[0] != pair[1]:
            read = mapped(read, _PROMOTIONS[pair])
        return mapped(read, _meaning(node, target))

    def _plain(self, node: Node) -> Reader:
        if node.kind == "fixed":
            return fixed(node.attributes["size"])
        return PRIMITIVES[node.kind]

    def _enum(self, node: Node, target: Node) -> Reader:
        _same_name(node, target)
        known, default = target.attributes["symbols"], target.attributes.get("default")
        symbols = node.attributes["symbols"]
        found = {symbol: symbol if symbol in known else default for symbol in symbols}
        return enum(node.name, symbols, {s: into for s, into in found.items() if into is not None})

    def _record(self, node: Node, target: Node) -> Reader:
        _same_name(node, target)
        fields = target.attributes["fields"]
        slots = _slots(node, target)
        template: list[Any] = [None] * (len(fields) + 1)  # the last takes what is thrown away
        for slot in set(range(len(fields))) - {*slots.values()}:
            template[slot] = self._default(fields[slot])
        steps: list[tuple[str, Reader, int]] = []
        for field in node.attributes["fields"]:
            slot = slots.get(field["name"], -1)
            wanted = None if slot < 0 else fields[slot]["type"]
            steps.append((field["name"], self._step(field["name"], field["type"], wanted), slot))
        return record(steps, template)

    def _step(self, name: str, written: Any, wanted: Any | None) -> Reader:
        try:
            return self.read(written, wanted)
        except Incompatible as error:
            raise Incompatible(f"{name}: {error}") from None

    def _default(self, field: dict[str, Any]) -> Any:
        if "default" not in field:
            raise Incompatible(f"{field['name']}: the writer has no such field, and no default")
        try:
            return default_value(self.reader, field["type"], field["default"])
        except (ValueError, KeyError, TypeError, AttributeError, Corrupt, NoSchema):
            raise Incompatible(f"{field['name']}: its default is not of its type") from None

    def _skip(self, node: Node) -> Reader:
        if node.kind == "record":
            return self._skip_record(node)
        if node.kind == "enum":
            symbols = node.attributes["symbols"]
            return enum(node.name, symbols, dict(zip(symbols, symbols, strict=True)))
        if node.kind == "array":
            return array(self.read(node.attributes["items"], None))
        if node.kind == "map":
            return mapping(self.read(node.attributes["values"], None))
        return self._plain(node)

    def _skip_record(self, node: Node) -> Reader:
        """A record that is thrown away may hold itself, so a name is looked up while reading."""
        if node.name in self.thrown_away:
            made = self.thrown_away[node.name]

            def read(data: bytes, at: int) -> tuple[Any, int]:
                return made[0](data, at)

            return read
        made = self.thrown_away[node.name] = []
        fields = node.attributes["fields"]
        made.append(record([(f["name"], self.read(f["type"], None), -1) for f in fields], [None]))
        return made[0]


def _slots(node: Node, target: Node) -> dict[str, int]:
    """Writer's field to the index of the reader's: by name, and where none has it, by alias."""
    written = [field["name"] for field in node.attributes["fields"]]
    slots: dict[str, int] = {}
    for slot, field in enumerate(target.attributes["fields"]):
        names = [field["name"], *field.get("aliases", ())]
        found = next((name for name in names if name in written and name not in slots), None)
        if found is not None:
            slots[found] = slot
    return slots


def _same_name(node: Node, target: Node) -> None:
    short = node.name.rpartition(".")[2]
    aliases = target.attributes.get("aliases", ())
    if short != target.name.rpartition(".")[2] and not {short, node.name} & {*aliases}:
        raise Incompatible(f"{node.kind} {node.name} is no {target.name}")


def _meaning(node: Node, target: Node) -> Callable[[Any], Any] | None:
    """From what was read to what the column takes: units by the writer's word if it has one."""
    logical = target.logical
    if logical in _UNITS:
        unit = _UNITS.get(node.logical, _UNITS[logical])
        if unit == 1:
            return None
        return (lambda n: n * unit) if unit > 0 else (lambda n: n // -unit)
    if logical == "uuid" and target.kind == "fixed":
        return lambda data: str(uuid.UUID(bytes=data))
    if logical == "decimal":
        return _decimal(node, target)
    return None


def _decimal(node: Node, target: Node) -> Callable[[bytes], Decimal]:
    digits, scale = target.attributes["precision"], target.attributes.get("scale", 0)
    if node.logical == "decimal" and node.attributes.get("scale", 0) != scale:
        raise Incompatible("a decimal of another scale")
    limit = 10**digits

    def decimal(data: bytes) -> Decimal:
        number = int.from_bytes(data, "big", signed=True) if len(data) < 32 else limit
        if abs(number) >= limit:
            raise Corrupt(f"a decimal has more than {digits} digits")
        return Decimal(number).scaleb(-scale, _EXACT)

    return decimal


def default_value(schema: AvroSchema, of: Any, default: Any) -> Any:
    """A field's default, which a schema writes in JSON, as a reader would have read it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, Corrupt: it is not of its type.
    """
    node, nullable = schema.nullable(of)
    if default is None and nullable:
        return None
    if node.kind == "record":
        return [
            default_value(
                schema, f["type"], default[f["name"]] if f["name"] in default else f["default"]
            )
            for f in node.attributes["fields"]
        ] + [None]
    if node.kind == "array":
        return [default_value(schema, node.attributes["items"], item) for item in [*default]]
    if node.kind == "map":
        values = node.attributes["values"]
        return {name: default_value(schema, values, item) for name, item in default.items()}
    if node.kind in ("bytes", "fixed"):
        value: Any = default.encode("latin-1")
    else:
        python = {"boolean": bool, "int": int, "long": int, "float": float, "double": float}
        value = default
        kind = python.get(node.kind, str)
        if kind is float and type(default) is int:
            value = float(default)
        if type(value) is not kind:
            raise ValueError(f"{default!r} is no {node.kind}")
    change = _meaning(node, node)
    return value if change is None else change(value)
