"""Avro's binary encoding, strictly: functions that read one value each.

Avro 1.11, "Data Serialization and Deserialization". Bytes that the specification doesn't allow
are refused, where common readers go on: an index below zero (which Python takes from the end), a
boolean of 7, a number longer than its type, a block's size that is not its size. A block can't
claim more items than bytes are left, so no record becomes larger in memory than its length
allows.

A reader takes the bytes and a position, and returns a value and the next position.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Reader = Callable[[bytes, int], tuple[Any, int]]
BROKEN = (IndexError, struct.error, UnicodeDecodeError)
"""What a reader raises for bytes that end too early or are no text, besides Corrupt."""


class Corrupt(Exception):
    """The bytes are no datum of the writer's schema, or one that the reader's has no place for."""


class _InRecord(Corrupt):
    """The same, its text beginning with a field's name."""


def explain(error: Exception) -> str:
    """Why a datum could not be read, for a reason."""
    if isinstance(error, Corrupt):
        return str(error)
    return "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it ends too early"


def read_long(data: bytes, at: int) -> tuple[int, int]:
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
    number, at = read_long(data, at)
    if not -0x80000000 <= number <= 0x7FFFFFFF:
        raise Corrupt("an int is longer than 32 bits")
    return number, at


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    begin, end = _length(data, at)
    return data[begin:end], end


def _string(data: bytes, at: int) -> tuple[str, int]:
    begin, end = _length(data, at)
    return data[begin:end].decode(), end


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Where bytes of a length that comes first begin and end."""
    length, at = read_long(data, at)
    end = at + length
    if length < 0 or end > len(data):
        raise Corrupt(f"{length} bytes are claimed, {len(data) - at} are left")
    return at, end


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


def fixed(size: int) -> Reader:
    """So many bytes."""

    def read(data: bytes, at: int) -> tuple[bytes, int]:
        end = at + size
        if end > len(data):
            raise IndexError
        return data[at:end], end

    return read


PRIMITIVES: dict[str, Reader] = {
    "null": _null,
    "boolean": _boolean,
    "int": _int,
    "long": read_long,
    "float": _unpacked("<f"),
    "double": _unpacked("<d"),
    "string": _string,
    "bytes": _bytes,
}
"""Readers of the types that have no attributes."""


def mapped(read: Reader, change: Callable[[Any], Any] | None) -> Reader:
    """Read, then change what was read."""
    if change is None:
        return read

    def read_and_change(data: bytes, at: int) -> tuple[Any, int]:
        value, at = read(data, at)
        return change(value), at

    return read_and_change


def failing(why: str) -> Reader:
    """Refuse every datum that comes here."""

    def read(_: bytes, __: int) -> tuple[Any, int]:
        raise Corrupt(why)

    return read


def union(branches: Sequence[Reader]) -> Reader:
    """The index of a branch, then what that branch reads."""
    known = len(branches)
    at_once = {index << 1: branch for index, branch in enumerate(branches[:64])}

    def read(data: bytes, at: int) -> tuple[Any, int]:
        branch = at_once.get(data[at])  # one byte, zigzag: true of nearly every union
        if branch is not None:
            return branch(data, at + 1)
        index, at = read_long(data, at)
        if not 0 <= index < known:
            raise Corrupt(f"a union of {known} has no member {index}")
        return branches[index](data, at)

    return read


def enum(name: str, symbols: Sequence[str], known: Mapping[str, str]) -> Reader:
    """The index of a symbol of the writer's; ``known`` maps it to the reader's."""

    def read(data: bytes, at: int) -> tuple[str, int]:
        index, at = _int(data, at)
        if not 0 <= index < len(symbols):
            raise Corrupt(f"{name} has no symbol {index}")
        symbol = known.get(symbols[index])
        if symbol is None:
            raise Corrupt(f"{symbols[index]} is no symbol of the reader's {name}")
        return symbol, at

    return read


def array(item: Reader) -> Reader:
    """Blocks of items."""

    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            count, end, at = _block(data, at)
            if not count:
                return items, at
            for _ in range(count):
                value, at = item(data, at)
                items.append(value)
            _check_block(at, end)

    return read


def mapping(item: Reader) -> Reader:
    """Blocks of names and items; of a name that is there twice, the last counts."""

    def read(data: bytes, at: int) -> tuple[dict[str, Any], int]:
        items: dict[str, Any] = {}
        while True:
            count, end, at = _block(data, at)
            if not count:
                return items, at
            for _ in range(count):
                name, at = _string(data, at)
                items[name], at = item(data, at)
            _check_block(at, end)

    return read


def record(steps: Sequence[tuple[str, Reader, int]], template: list[Any]) -> Reader:
    """Fields in the writer's order, each to its slot; unwritten slots keep the template's value."""

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

    return read


def _block(data: bytes, at: int) -> tuple[int, int | None, int]:
    """A block's head: how many items, where they end (if it is said), and where they begin."""
    count, at = read_long(data, at)
    end = None
    if count < 0:
        size, at = read_long(data, at)
        count, end = -count, at + size
    if count > len(data) - at:
        raise Corrupt(f"{count} items are claimed, {len(data) - at} bytes are left")
    return count, end, at


def _check_block(at: int, end: int | None) -> None:
    if end is not None and at != end:
        raise Corrupt("a block has another size than it claims")
