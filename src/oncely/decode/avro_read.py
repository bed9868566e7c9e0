"""Reads Avro datums strictly: a writer's and a reader's schema are compiled to one function.

Avro 1.11, "Data Serialization and Deserialization" and "Schema Resolution". Bytes that the
specification forbids are refused, although common readers accept them: a negative index (which
Python counts from the end), a boolean of 7, a number longer than its type, a wrong size of a block.

Values and work grow no faster than a record's bytes. A block cannot claim more items than bytes are
left. A value of no bytes (null, a fixed of size 0, a record of such fields) is a constant: no field
is read for it, and the arrays of a record have at most 1,024 such items, and one for each byte.
The number of types is bounded by :data:`oncely.decode.avro_schema.MOST_TYPES`.

A reader takes the bytes and a position, and returns a value and the next position. Values have the
form that :class:`oncely.decode.columns.Columns` accepts: records are lists in the reader schema's
order, maps are dicts, instants microseconds, dates days, decimals Decimal.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Context, Decimal
from functools import update_wrapper
from typing import Any, cast

from oncely.decode.avro_schema import UNITS, AvroSchema, Node, NoSchema

Reader = Callable[[bytes, int], tuple[Any, int]]
Plan = tuple[Any, ...]
"""A reader for ``oncely-native``: its kind, and what it consists of."""
BROKEN = (IndexError, struct.error, UnicodeDecodeError)
"""The exceptions of a reader for bytes that end too early or are not UTF-8, besides Corrupt."""
_MOST_EMPTY = 1_024  # items that take no bytes, besides one for each byte of the record
_EXACT = Context(prec=38)  # the maximum number of digits of a DECIMAL


class Corrupt(Exception):
    """The bytes are not a valid datum of the writer's schema, or cannot be resolved to the
    reader's."""


class _InRecord(Corrupt):
    """A Corrupt error whose text begins with a field's name."""


class Incompatible(Exception):
    """The writer's schema cannot be resolved to the reader's."""


def plan_of(read: Reader) -> Plan | None:
    """The plan of a reader, or None if ``oncely-native`` has no such reader."""
    return vars(read).get("plan")


def _planned(read: Reader, kind: str, *parts: Any) -> Reader:
    """Give a reader its plan, unless a part is None."""
    if None not in parts:
        vars(read)["plan"] = (kind, *parts)
    return read


def _constant_of(read: Reader) -> list[Any] | None:
    """The only value of a reader that takes no bytes, alone in a list; None for other readers."""
    return vars(read).get("constant")


def _with_constant(read: Reader, value: Any) -> Reader:
    vars(read)["constant"] = [value]
    return read


class _Counting(bytes):
    """A datum that counts items of no bytes."""

    items = 0

    def add(self, count: int) -> int:
        self.items += count
        if self.items > len(self) + _MOST_EMPTY:
            raise Corrupt(f"more than {len(self) + _MOST_EMPTY} items take no bytes")
        return count


def _all(plans: Sequence[Any]) -> Sequence[Any] | None:
    return None if None in plans else plans


def explain(error: Exception) -> str:
    """The reason why a datum could not be read, for a rejection."""
    if isinstance(error, Corrupt):
        return str(error)
    return "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it ends too early"


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint of at most 64 bits."""
    byte = data[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    number, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise Corrupt("a number is longer than 64 bits")
    if number >> 64:
        raise Corrupt("a number is longer than 64 bits")
    return (number >> 1) ^ -(number & 1), at


def _int(data: bytes, at: int) -> tuple[int, int]:
    number, at = _long(data, at)
    if not -0x80000000 <= number <= 0x7FFFFFFF:
        raise Corrupt("an int is longer than 32 bits")
    return number, at


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = _long(data, at)
    end = at + length
    if length < 0 or end > len(data):
        raise Corrupt(f"{length} bytes are claimed, {len(data) - at} are left")
    return data[at:end], end


def _string(data: bytes, at: int) -> tuple[str, int]:
    text, at = _bytes(data, at)
    return text.decode(), at


def _boolean(data: bytes, at: int) -> tuple[bool, int]:
    byte = data[at]
    if byte > 1:
        raise Corrupt(f"a boolean is 0 or 1, not {byte}")
    return byte == 1, at + 1


def _unpacked(form: str) -> Reader:
    unpack, size = struct.Struct(form).unpack_from, struct.calcsize(form)

    def read(data: bytes, at: int) -> tuple[float, int]:
        return unpack(data, at)[0], at + size

    return read


def _null(_: bytes, at: int) -> tuple[None, int]:
    return None, at


_PRIMITIVES: dict[str, Reader] = {
    "null": _null,
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "float": _unpacked("<f"),
    "double": _unpacked("<d"),
    "string": _string,
    "bytes": _bytes,
}
for _kind, _read in _PRIMITIVES.items():
    _planned(_read, _kind)
_with_constant(_null, None)
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


def _fixed(size: int) -> Reader:
    def read(data: bytes, at: int) -> tuple[bytes, int]:
        end = at + size
        if end > len(data):
            raise IndexError
        return data[at:end], end

    _planned(read, "fixed", size if size < 1 << 31 else None)
    return read if size else _with_constant(read, b"")


def _mapped(read: Reader, change: Callable[[Any], Any] | None) -> Reader:
    """A reader that applies ``change`` to the value."""
    if change is None:
        return read
    plan = plan_of(read)
    if change not in (float, str.encode, bytes.decode):  # which the column's type implies
        how = getattr(change, "plan", None)
        plan = None if plan is None or how is None else (how[0], plan, *how[1:])

    def read_and_change(data: bytes, at: int) -> tuple[Any, int]:
        value, at = read(data, at)
        return change(value), at

    constant = _constant_of(read)
    if constant is not None:
        _with_constant(read_and_change, change(*constant))
    return read_and_change if plan is None else _planned(read_and_change, *plan)


def _failing(why: str) -> Reader:
    def read(_: bytes, __: int) -> tuple[Any, int]:
        raise Corrupt(why)

    return _planned(read, "fail")


def _union(branches: Sequence[Reader]) -> Reader:
    """The index of a branch, then the branch's value."""
    known = len(branches)
    at_once = {index << 1: branch for index, branch in enumerate(branches[:64])}

    def read(data: bytes, at: int) -> tuple[Any, int]:
        branch = at_once.get(data[at])  # one byte, zigzag: the common case
        if branch is not None:
            return branch(data, at + 1)
        index, at = _long(data, at)
        if not 0 <= index < known:
            raise Corrupt(f"a union of {known} has no member {index}")
        return branches[index](data, at)

    return _planned(read, "union", _all([plan_of(branch) for branch in branches]))


def _enum(name: str, symbols: Sequence[str], known: Mapping[str, str]) -> Reader:
    """The index of a symbol of the writer; ``known`` maps it to the reader's."""

    def read(data: bytes, at: int) -> tuple[str, int]:
        index, at = _int(data, at)
        if not 0 <= index < len(symbols):
            raise Corrupt(f"{name} has no symbol {index}")
        symbol = known.get(symbols[index])
        if symbol is None:
            raise Corrupt(f"{symbols[index]} is no symbol of the reader's {name}")
        return symbol, at

    into = [known.get(symbol) for symbol in symbols]
    plain = all(each is None or (type(each) is str and each.isascii()) for each in into)
    return _planned(read, "enum", into if plain else None)


def _array(item: Reader) -> Reader:
    """Blocks of items. If these take no bytes, the datum is a :class:`_Counting`."""
    constant = _constant_of(item)

    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            count, at = _long(data, at)
            if not count:
                return items, at
            end = None
            if count < 0:  # the block's size in bytes follows
                size, at = _long(data, at)
                count, end = -count, at + size
            if constant is not None:
                items += constant * cast("_Counting", data).add(count)
                count = 0
            if count > len(data) - at:
                raise Corrupt(f"{count} items are claimed, {len(data) - at} bytes are left")
            for _ in range(count):
                value, at = item(data, at)
                items.append(value)
            if end is not None and at != end:
                raise Corrupt("a block has another size than it claims")

    return _planned(read, "array", plan_of(item))


def _map(item: Reader) -> Reader:
    """Blocks of names and items; of repeated names the last counts."""

    def entry(data: bytes, at: int) -> tuple[tuple[str, Any], int]:
        name, at = _string(data, at)
        value, at = item(data, at)
        return (name, value), at

    return _planned(_mapped(_array(entry), dict), "map", plan_of(item))


def _record(steps: Sequence[tuple[str, Reader, int]], template: list[Any]) -> Reader:
    """Fields in the writer's order, each into its slot; other slots keep the template's value."""
    for _, step, slot in steps:
        template[slot : slot + 1 or None] = _constant_of(step) or [template[slot]]
    steps = [step for step in steps if _constant_of(step[1]) is None]

    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        values = template.copy()
        name = ""
        try:
            for name, step, slot in steps:  # noqa: B007 - the name is for the error
                values[slot], at = step(data, at)
        except (Corrupt, *BROKEN) as error:
            join = "." if isinstance(error, _InRecord) else ": "
            raise _InRecord(f"{name}{join}{explain(error)}") from None
        return values, at

    plans = [(plan_of(step), slot) for _, step, slot in steps]
    missing = {*range(len(template) - 1)} - {slot for _, slot in plans}
    plans += [(_constant(template[slot]), slot) for slot in sorted(missing)]
    _planned(read, "record", None if any(plan is None for plan, _ in plans) else plans)
    return read if steps else _with_constant(read, template)


def _constant(value: Any) -> Plan | None:
    """A reader of a default, which takes no bytes."""
    if type(value) is str:
        return ("given", value.encode()) if value.isascii() else None
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return None
    kind = _CONSTANTS.get(type(value))
    return None if kind is None else (kind, value)


_CONSTANTS = {type(None): "null", bool: "bool", int: "whole", float: "real", bytes: "given"}


def compile_reader(writer: AvroSchema, reader: AvroSchema) -> Reader:
    """Compile a function that reads a datum of ``writer`` as a value of ``reader``.

    ``reader`` has passed :func:`oncely.decode.avro_schema.to_arrow`: no unions of several types, no
    recursive type.

    Raises:
        Incompatible: no datum can be read.
        NoSchema: a schema has too many types.
    """
    compiler = _Compiler(writer, reader)
    try:
        read = compiler.read(writer.root, reader.root)
    except RecursionError:
        raise Incompatible("its types are nested too deeply") from None
    if not compiler.counts:
        return read
    return update_wrapper(lambda data, at: read(_Counting(data), at), read)


class _Compiler:
    """Walks both schemas; ``wanted`` and ``target`` None: read the value and drop it."""

    def __init__(self, writer: AvroSchema, reader: AvroSchema) -> None:
        self.writer, self.reader = replace(writer), replace(reader)
        self.counts = False  # items that take no bytes
        self.dropped: dict[str, list[Reader]] = {}

    def read(self, written: Any, wanted: Any | None) -> Reader:
        node = self.writer.node(written)
        if node.kind == "union":
            return _union([self._branch(each, wanted) for each in node.attributes["members"]])
        if wanted is None:
            return self._match(node, None)
        target, nullable = self.reader.nullable(wanted)
        if node.kind == "null":
            if not nullable:
                raise Incompatible(f"null is no {target.kind}")
            return _null
        return self._match(node, target)

    def _branch(self, member: Any, wanted: Any | None) -> Reader:
        try:
            return self.read(member, wanted)
        except Incompatible as error:  # only a datum with this branch is rejected
            return _failing(str(error))

    def _match(self, node: Node, target: Node | None) -> Reader:
        pair = node.kind, (target or node).kind
        if pair[0] != pair[1] and pair not in _PROMOTIONS:
            raise Incompatible(f"{pair[0]} is no {pair[1]}")
        if node.kind == "record":
            return self._dropped(node) if target is None else self._record(node, target)
        if node.kind == "enum":
            return self._enum(node, target or node)
        if node.kind == "array":
            item = self.read(node.attributes["items"], _inside(target, "items"))
            self.counts |= _constant_of(item) is not None
            return _array(item)
        if node.kind == "map":
            return _map(self.read(node.attributes["values"], _inside(target, "values")))
        if node.kind == "fixed":
            _check_fixed(node, target or node)
            plain = _fixed(node.attributes["size"])
        else:
            plain = _PRIMITIVES[node.kind]
        if target is None:
            return plain
        return _mapped(_mapped(plain, _PROMOTIONS.get(pair)), _meaning(node, target))

    def _enum(self, node: Node, target: Node) -> Reader:
        _check_name(node, target)
        known, default = target.attributes["symbols"], target.attributes.get("default")
        symbols = node.attributes["symbols"]
        found = {symbol: symbol if symbol in known else default for symbol in symbols}
        return _enum(node.name, symbols, {s: into for s, into in found.items() if into is not None})

    def _record(self, node: Node, target: Node) -> Reader:
        _check_name(node, target)
        fields = target.attributes["fields"]
        slots = _slots(node, target)
        template: list[Any] = [None] * (len(fields) + 1)  # the last slot receives dropped values
        for slot in set(range(len(fields))) - {*slots.values()}:
            template[slot] = self._default(fields[slot])
        steps: list[tuple[str, Reader, int]] = []
        for field in node.attributes["fields"]:
            slot = slots.get(field["name"], -1)
            wanted = None if slot < 0 else fields[slot]["type"]
            try:
                steps.append((field["name"], self.read(field["type"], wanted), slot))
            except Incompatible as error:
                raise Incompatible(f"{field['name']}: {error}") from None
        return _record(steps, template)

    def _dropped(self, node: Node) -> Reader:
        """A dropped record may be recursive, so its reader is looked up at run time."""
        made = self.dropped.get(node.name, [])
        if node.name not in self.dropped:
            self.dropped[node.name] = made
            fields = node.attributes["fields"]
            made.append(_record([(f["name"], self.read(f["type"], None), -1) for f in fields], [0]))

        def read(data: bytes, at: int) -> tuple[Any, int]:
            return made[0](data, at)

        vars(read).update(vars(made[0]) if made else {})
        return read

    def _default(self, field: dict[str, Any]) -> Any:
        if "default" not in field:
            raise Incompatible(f"{field['name']}: the writer has no such field, and no default")
        try:
            return _default(self.reader, field["type"], field["default"])
        except (ValueError, KeyError, TypeError, AttributeError, Corrupt, NoSchema):
            raise Incompatible(f"{field['name']}: its default is not of its type") from None


def _inside(target: Node | None, name: str) -> Any | None:
    return None if target is None else target.attributes[name]


def _slots(node: Node, target: Node) -> dict[str, int]:
    """Index of the reader's field by the writer's field: by name, else by alias."""
    written = {field["name"] for field in node.attributes["fields"]}
    slots: dict[str, int] = {}
    for slot, field in enumerate(target.attributes["fields"]):
        names = [field["name"], *field.get("aliases", ())]
        found = next((name for name in names if name in written and name not in slots), None)
        if found is not None:
            slots[found] = slot
    return slots


def _check_name(node: Node, target: Node) -> None:
    short = node.name.rpartition(".")[2]
    aliases = target.attributes.get("aliases", ())
    if short != target.name.rpartition(".")[2] and not {short, node.name} & {*aliases}:
        raise Incompatible(f"{node.kind} {node.name} is no {target.name}")


def _check_fixed(node: Node, target: Node) -> None:
    _check_name(node, target)
    if node.attributes["size"] != target.attributes["size"]:
        raise Incompatible(f"{node.name} has another size")


def _meaning(node: Node, target: Node) -> Callable[[Any], Any] | None:
    """Conversion of a decoded value to the column's value; units are the writer's if it has any."""
    logical = target.logical
    if logical in UNITS:
        unit = UNITS.get(node.logical, UNITS[logical])
        if unit == 1:
            return None
        change = (lambda n: n * unit) if unit > 0 else (lambda n: n // -unit)
        vars(change)["plan"] = ("scaled", unit)
        return change
    if logical == "uuid" and target.kind == "fixed":
        return lambda data: str(uuid.UUID(bytes=data))
    return _decimal(node, target) if logical == "decimal" else None


def _decimal(node: Node, target: Node) -> Callable[[bytes], Decimal]:
    digits, scale = target.attributes["precision"], target.attributes.get("scale", 0)
    if node.logical == "decimal" and node.attributes.get("scale", 0) != scale:
        raise Incompatible("a decimal of another scale")
    limit = 10**digits

    def decimal(data: bytes) -> Decimal:
        number = int.from_bytes(data, "big", signed=True)
        if abs(number) >= limit:
            raise Corrupt(f"a decimal has more than {digits} digits")
        return Decimal(number).scaleb(-scale, _EXACT)

    vars(decimal)["plan"] = ("decimal",)
    return decimal


_JSON_TYPES = {"boolean": bool, "int": int, "long": int, "float": float, "double": float}


def _default(schema: AvroSchema, of: Any, default: Any) -> Any:
    """A field's default, which a schema contains as JSON, in the form of a decoded value.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, Corrupt: it is not of its type.
    """
    node, nullable = schema.nullable(of)
    if default is None and nullable:
        return None
    if node.kind == "record":
        values = [
            (f["type"], default[f["name"]] if f["name"] in default else f["default"])
            for f in node.attributes["fields"]
        ]
        return [*(_default(schema, kind, value) for kind, value in values), None]
    if node.kind == "array":
        return [_default(schema, node.attributes["items"], item) for item in [*default]]
    if node.kind == "map":
        kind = node.attributes["values"]
        return {name: _default(schema, kind, item) for name, item in default.items()}
    if node.kind in ("bytes", "fixed"):
        value: Any = default.encode("latin-1")
    else:
        python = _JSON_TYPES.get(node.kind, str)
        value = float(default) if python is float and type(default) is int else default
        if type(value) is not python:
            raise ValueError(f"{default!r} is no {node.kind}")
    change = _meaning(node, node)
    return value if change is None else change(value)
