"""Fetched records as Arrow, and as JSON lines for shells.

In JSON lines bytes are the UTF-8 text that they are, or ``{"base64": …}``. On input any other
JSON value stands for its own text: numbers are not rounded.
"""

from __future__ import annotations

import base64
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.ranges import TopicPartition
from oncely.errors import WrongInput

if TYPE_CHECKING:
    from oncely.kafka.sender import Message

RECORDS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""Records in the form of Spark's Kafka source."""

LATEST_MS = (2**63 - 1) // 1000
"""The last timestamp that a column can hold, in the year 294,247; later ones are null."""
EVERY_COLUMN = frozenset(RECORDS.names)
_ORIGIN = frozenset({"topic", "partition", "offset"})


class KafkaRecord(NamedTuple):
    """A record as Kafka stores it; its offset is the key under which it is returned.

    Attributes:
        timestamp_ms: milliseconds since 1970, or None.
        key: bytes, or None.
        value: bytes, or None for a tombstone.
        headers: name and bytes, in order.
    """

    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Row(NamedTuple):
    """A record of columns, as far as a message of confluent-kafka is asked for the same."""

    batch: pa.RecordBatch
    at: int

    def offset(self) -> int:
        """The record's offset."""
        offset: int = self.batch["offset"][self.at].as_py()
        return offset

    def leader_epoch(self) -> int:
        """The leader epoch; -1 if it is unknown."""
        epoch: int = self.batch["leader_epoch"][self.at].as_py()
        return epoch


@dataclass(frozen=True)
class RecordColumns(Sequence[Row]):
    """Consecutive records of a partition in columns; parts of it are not copied.

    Attributes:
        batch: ``offset``, ``leader_epoch`` and columns of :data:`RECORDS`, of several partitions.
        rows: those of this partition.
    """

    batch: pa.RecordBatch
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> RecordColumns: ...
    def __getitem__(self, at: int | slice) -> Row | RecordColumns:
        found = self.rows[at]
        if isinstance(found, range):
            return RecordColumns(self.batch, found)
        return Row(self.batch, found)

    @property
    def own(self) -> pa.RecordBatch:
        """The rows of this partition, without a copy."""
        return self.batch.slice(self.rows.start, len(self.rows))

    def alone(self) -> RecordColumns:
        """The records for a reader that keeps them: a copy if most of the memory is of others."""
        if 2 * len(self) >= self.batch.num_rows:
            return self
        return _all_of(self.batch.take(pa.array(self.rows, pa.int64())))


def _all_of(batch: pa.RecordBatch) -> RecordColumns:
    return RecordColumns(batch, range(batch.num_rows))


Records = Sequence[Any]
"""Consecutive records of a partition, without errors: messages of confluent-kafka, or
:class:`RecordColumns`."""


def offsets_of(records: Records) -> npt.NDArray[np.int64]:
    """The offset of each record."""
    if isinstance(records, RecordColumns):
        offsets: npt.NDArray[np.int64] = records.own["offset"].to_numpy()
        return offsets
    return np.fromiter((one.offset() for one in records), np.int64, len(records))


def timestamps_of(records: Records) -> list[int | None]:
    """The timestamp of each record, in ms since 1970; None: it has none."""
    if isinstance(records, RecordColumns):
        micros = records.own["timestamp"].cast(pa.int64()).to_pylist()
        return [None if one is None else one // 1000 for one in micros]
    return [timestamp_of(one) for one in records]


NO_TIMESTAMP = -1
"""The CreateTime of a record without a timestamp (KIP-32)."""


def timestamp_of(message: Any) -> int | None:
    """The timestamp of a message of confluent-kafka, in ms since 1970; None: it has none."""
    kind, at = message.timestamp()
    return at if kind and at != NO_TIMESTAMP else None


UNREADABLE = "\ufffd"
"""The name of a header whose own name is not UTF-8."""


# A call that Python has specialised would not notice the error, and go on with the broken list.
_asked_headers = methodcaller("headers")


def headers_of(message: Any) -> Sequence[tuple[str, bytes | None]]:
    """The headers of a message of confluent-kafka, which raises for a name that is not UTF-8."""
    try:
        return _asked_headers(message) or ()
    except (SystemError, UnicodeDecodeError):
        pass
    # It has kept its list then, with NULL in the place of such a name: asked by index, Python
    # would crash. get_referents leaves NULL out.
    found: list[tuple[str, bytes | None]] = _asked_headers(message)
    for at, pair in enumerate(found):
        names = [part for part in gc.get_referents(pair) if isinstance(part, str)]
        found[at] = (names[0] if names else UNREADABLE, pair[1])
    return found


def without(records: Records, indices: Collection[int]) -> Records:
    """The records but those at these indices."""
    if isinstance(records, RecordColumns):
        kept = np.ones(len(records), np.bool_)
        kept[list(indices)] = False
        return _all_of(records.own.filter(pa.array(kept)))
    return [one for at, one in enumerate(records) if at not in indices]


def table_of(runs: Iterable[tuple[TopicPartition, Records]], needs: frozenset[str]) -> pa.Table:
    """Records as a table with their origin and the columns that are needed.

    Args:
        runs: records of a partition, or some of them; ascending in each partition, and all of one
            kind.
        needs: names of :data:`RECORDS`.

    Returns:
        ``topic`` (a dictionary of strings), ``partition``, ``offset``, and ``needs``.
    """
    runs = list(runs)
    counts = [len(some) for _, some in runs]
    topics = sorted({tp.topic for tp, _ in runs})
    topic = np.repeat(np.array([topics.index(tp.topic) for tp, _ in runs], np.int32), counts)
    number = np.repeat(np.array([tp.partition for tp, _ in runs], np.int32), counts)
    columns: dict[str, Any] = {
        "topic": pa.DictionaryArray.from_arrays(topic, pa.array(topics, pa.string())),
        "partition": pa.array(number),
    }
    names = ["offset", *sorted(needs - _ORIGIN)]
    if found := [some for _, some in runs if isinstance(some, RecordColumns)]:
        records = _joined(found)
        return pa.table(columns | {name: records[name] for name in names})
    messages = [one for _, some in runs for one in some]
    return pa.table(columns | {name: _COLUMNS[name](messages) for name in names})


def _joined(found: Sequence[RecordColumns]) -> pa.Table:
    """The records of all, as one chunk, as a decoder works by chunks; what is one part in memory
    is not copied."""
    parts: list[RecordColumns] = []
    for one in found:
        rows = one.rows
        if parts and parts[-1].batch is one.batch and parts[-1].rows.stop == rows.start:
            rows = range(parts.pop().rows.start, rows.stop)
        parts.append(RecordColumns(one.batch, rows))
    return pa.Table.from_batches([one.own for one in parts]).combine_chunks()


def each(records: pa.Table) -> Iterator[tuple[TopicPartition, int, KafkaRecord]]:
    """Partition, offset and record of each row of a table with all columns of :data:`RECORDS`."""
    # Kafka's timestamps may lie beyond the year 9999, Python's may not.
    micros = records["timestamp"].cast(pa.int64())
    columns = [micros if name == "timestamp" else records[name] for name in RECORDS.names]
    rows: Iterable[Any] = zip(*(one.to_pylist() for one in columns), strict=True)
    for topic, number, offset, at, key, value, headers in rows:
        pairs = tuple((one["key"], one["value"]) for one in headers)
        record = KafkaRecord(None if at is None else at // 1000, key, value, pairs)
        yield TopicPartition(topic, number), offset, record


def _timestamps(messages: Sequence[Any]) -> pa.Array:
    values = pa.array(timestamps_of(messages), pa.int64())
    try:
        micros = pc.multiply_checked(values, 1000)
    except pa.ArrowInvalid:  # nanoseconds as milliseconds, for example
        low, high = pc.greater_equal(values, -LATEST_MS), pc.less_equal(values, LATEST_MS)
        micros = pc.multiply(pc.if_else(pc.and_(low, high), values, None), 1000)
    return micros.cast(RECORDS.field("timestamp").type)


def _headers(messages: Sequence[Any]) -> pa.Array:
    headers = [headers_of(one) for one in messages]
    offsets = np.cumsum([0, *map(len, headers)], dtype=np.int32)
    pairs = [pair for one in headers for pair in one]
    names = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.binary())
    together = pa.StructArray.from_arrays([names, values], ["key", "value"])
    return pa.ListArray.from_arrays(offsets, together)


_COLUMNS: Mapping[str, Callable[[Sequence[Any]], pa.Array]] = {
    "offset": lambda messages: pa.array([one.offset() for one in messages], pa.int64()),
    "timestamp": _timestamps,
    "key": lambda messages: pa.array([one.key() for one in messages], pa.binary()),
    "value": lambda messages: pa.array([one.value() for one in messages], pa.binary()),
    "headers": _headers,
}


MEMBERS = frozenset({"key", "value", "headers"})
"""The members of a record to be written."""

Members = Mapping[str, msgspec.Raw]


def shown(value: bytes | None) -> Any:
    """Bytes as a JSON-able value."""
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value or b"").decode()}


def in_words(value: Any) -> str | None:
    """The result of :func:`shown` as a text."""
    return f"base64: {value['base64']}" if isinstance(value, dict) else value


def as_json(tp: TopicPartition, offset: int, record: KafkaRecord) -> dict[str, Any]:
    """A record as JSON-able values; ``headers`` only if it has some."""
    found = {
        "topic": tp.topic,
        "partition": tp.partition,
        "offset": offset,
        "timestamp": _timestamp(record.timestamp_ms),
        "key": shown(record.key),
        "value": shown(record.value),
    }
    if record.headers:
        found["headers"] = [[name, shown(value)] for name, value in record.headers]
    return found


def members(line: bytes | str, where: str, allowed: Collection[str] | None = None) -> Members:
    """The members of a line's object.

    Args:
        line: the line.
        where: its place, for messages.
        allowed: the names of members; by default any.

    Raises:
        WrongInput: it is no object, or has other members.
    """
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise WrongInput(f"{where}: found {_start(line)}", way_out=_way_out(allowed)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WrongInput(f"{where}: no JSON: {error}", way_out=_way_out(allowed)) from None
    if allowed is not None and (others := found.keys() - set(allowed)):
        raise WrongInput(f"{where}: found {sorted(others)[0]!r}", way_out=_way_out(allowed))
    return found


def message_of(given: Members, where: str) -> Message:
    """The record of a line's members.

    Raises:
        WrongInput: key, value or headers cannot be written.
    """
    from oncely.kafka.sender import Message  # not in tasks

    return Message(
        content_of(given.get("value"), where),
        content_of(given.get("key"), where),
        _read_headers(given.get("headers"), where),
    )


def content_of(raw: msgspec.Raw | None, where: str) -> bytes | None:
    """The bytes for which a JSON value stands: a text's UTF-8, the bytes of ``{"base64": …}``, None
    for null, and any other value as it is written.

    Raises:
        WrongInput: no base64.
    """
    text = b"null" if raw is None else bytes(raw).strip()
    if text[:1] == b'"':
        return msgspec.json.decode(text, type=str).encode()
    if text == b"null":
        return None
    if text[:1] == b"{" and len(found := msgspec.json.decode(text)) == 1 and "base64" in found:
        try:
            return base64.b64decode(found["base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise WrongInput(f"{where}: no base64: {error}") from None
    return text


def _read_headers(raw: msgspec.Raw | None, where: str) -> list[tuple[str, bytes | None]]:
    """Headers as an object, or as pairs, whose names may repeat."""
    if raw is None:
        return []
    try:
        pairs: Any = msgspec.json.decode(
            raw, type=dict[str, msgspec.Raw] | list[tuple[str, msgspec.Raw]] | None
        )
    except msgspec.DecodeError:
        raise WrongInput(
            f"{where}: headers are an object of names and texts, or a list of such pairs"
        ) from None
    items = pairs.items() if isinstance(pairs, dict) else pairs or ()
    return [(name, content_of(value, where)) for name, value in items]


def _timestamp(millis: int | None) -> str | int | None:
    """ISO 8601 in UTC; None if there is none, and the number beyond the years 1 to 9999."""
    if millis is None:
        return None
    try:
        at = datetime.fromtimestamp(millis / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return millis
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _start(line: bytes | str) -> str:
    return (line.decode(errors="replace") if isinstance(line, bytes) else line)[:60]


def _way_out(allowed: Collection[str] | None) -> str:
    return f"an object of {sorted(allowed)}" if allowed else "a JSON object in each line"
