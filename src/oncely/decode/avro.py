"""Avro records to columns: bare datums, or Confluent's wire format with schemas by id from a
Confluent-compatible schema registry.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.avro_read import (
    BROKEN,
    Corrupt,
    Incompatible,
    Plan,
    Reader,
    compile_reader,
    explain,
    plan_of,
)
from oncely.decode.avro_schema import DEEPEST, AvroSchema, Definition, NoSchema, to_arrow
from oncely.decode.base import Decoded, InvalidRecord
from oncely.decode.columns import (
    BytesDecoder,
    ColumnLeaf,
    Columns,
    Piece,
    Positions,
    fit,
    read_each,
    read_native,
)
from oncely.decode.times import checked
from oncely.errors import ConfigError, SchemaChanged, Unavailable
from oncely.extras import native, require
from oncely.per_process import PerProcess
from oncely.secrets import Secrets

if TYPE_CHECKING:
    # The client brings HTTP and OAuth packages: only pipelines with a registry import it.
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

_HEAD = 5  # a zero byte and the schema's id in four bytes, big-endian
_MOST_HEADS = 8  # that are read natively in a slice: each costs a pass over those that are left


@dataclass(frozen=True, kw_only=True)
class AvroDecoder(BytesDecoder):
    """Decodes records that consist of exactly one Avro datum each.

    Without a ``registry`` each value is a bare datum of the schema (not a container file). With one
    it begins with Confluent's header: a zero byte and the id of the writer's schema, big-endian in
    four bytes; the datum is resolved to the reader's schema ("Schema Resolution", Avro 1.11).

    A null or empty value, an id that is missing in the registry (HTTP 404) or not of an Avro
    schema, a writer's schema that cannot be resolved, invalid bytes, and bytes after the datum are
    rejections. See :mod:`oncely.decode.avro_read` for the strictness. A registry that does not
    answer is :class:`oncely.errors.Unavailable`, raised by ``decode``: no record is at fault.

    A schema id that comes for the first time is compared with the subjects from which the columns
    were derived. If one of them has a newer schema, ``decode`` raises
    :class:`oncely.errors.SchemaChanged`: the columns may lack a field of it.

    Attributes:
        definition: the reader's schema.
        registry: the registry of the writers' schemas.
        newest: the subjects from which the columns were derived.
    """

    definition: Definition
    registry: Registry | None = None
    newest: Newest = ()

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record: a row or a rejection.

        Raises:
            Unavailable: the registry does not answer.
            ConfigError: the registry refuses the login.
            SchemaChanged: the columns were derived from a schema that is no longer the newest.
        """
        decoded = super().decode(records)
        # An unknown id may be registered later; the registry is not asked in each batch.
        for schema_id in [i for i, found in self._readers.items() if isinstance(found, str)]:
            del self._readers[schema_id]
        return decoded

    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        pieces, unsure = self._natively(values)
        chosen = values if len(unsure) == len(values) else values.take(pa.array(unsure))
        rows, good, refused = read_each(chosen.to_pylist(), self._datum)
        more, misfits = fit(rows, good, self._batch)
        pieces += [(unsure[at], batch) for at, batch in more]
        return pieces, {int(unsure[at]): why for at, why in (refused | misfits).items()}

    def _natively(self, values: pa.Array) -> tuple[list[Piece], Positions]:
        """The rows that ``oncely-native`` reads with certainty, and the other positions."""
        pieces: list[Piece] = []
        unsure = np.arange(len(values))
        if native() is None:
            return pieces, unsure
        heads = [b""]
        if self.registry is not None:
            heads = pc.unique(pc.binary_slice(values, 0, _HEAD)).to_pylist()[:_MOST_HEADS]
        for head in heads:
            plan = self._plan(head)
            if plan is not None:
                chosen = values if len(unsure) == len(values) else values.take(pa.array(unsure))
                found, left = read_native(self.schema, chosen, lambda m: m.avro_rows, plan, head)
                pieces += [(unsure[at], batch) for at, batch in found]
                unsure = unsure[left]
        return pieces, unsure

    def _plan(self, head: bytes | None) -> Plan | None:
        if self.registry is None:
            return plan_of(self._bare)
        try:
            return plan_of(self._head(head)[0]) if head else None
        except InvalidRecord:
            return None

    def _datum(self, data: bytes | None) -> Any:
        if not data:
            raise InvalidRecord(f"the {self.column} is {'null' if data is None else 'empty'}")
        read, at = (self._bare, 0) if self.registry is None else self._head(data)
        try:
            value, end = read(data, at)
        except (Corrupt, *BROKEN) as error:
            raise InvalidRecord(f"the {self.column} is no Avro datum: {explain(error)}") from None
        except RecursionError:
            raise InvalidRecord(f"the {self.column} is nested too deeply") from None
        if end != len(data):
            raise InvalidRecord(f"the {self.column} has {len(data) - end} bytes after its datum")
        return value

    def _head(self, data: bytes) -> tuple[Reader, int]:
        if data[0] != 0 or len(data) < _HEAD:
            raise InvalidRecord(
                f"the {self.column} does not begin with a zero byte and a schema id, "
                f"but with 0x{data[:_HEAD].hex()}"
            )
        schema_id = int.from_bytes(data[1:_HEAD], "big")
        read = self._readers.get(schema_id)
        if read is None:
            read = self._readers[schema_id] = self._writer(schema_id)
        if isinstance(read, str):
            raise InvalidRecord(read)
        return read, _HEAD

    def _writer(self, schema_id: int) -> Reader | str:
        assert self.registry is not None  # noqa: S101 - only with a registry is there a head
        try:
            writer = AvroSchema.parse(self.registry.by_id(schema_id))
            self.registry.refuse_newer(schema_id, self.newest)
            return compile_reader(writer, self._reader)
        except UnknownSchema as error:
            return str(error)
        except NoSchema as error:
            return f"schema id {schema_id} is no Avro schema: {error}"
        except Incompatible as error:
            return f"schema id {schema_id} can't be read as the columns' schema: {error}"

    @cached_property
    def _readers(self) -> dict[int, Reader | str]:
        """By schema id: the reader of its datums, or the reason why they cannot be read."""
        return {}

    @cached_property
    def _reader(self) -> AvroSchema:
        return AvroSchema.parse(self.definition)

    @cached_property
    def _bare(self) -> Reader:
        return compile_reader(self._reader, self._reader)

    def _batch(self, rows: Any) -> pa.RecordBatch:
        lists = [[row[index] for row in rows] for index in range(len(self.schema))]
        return _BY_INDEX.batch(self.schema, lists)


def avro_decoder(
    definition: Definition,
    *,
    registry: Registry | None = None,
    column: str = "value",
    key: str = "decode.schema",
) -> AvroDecoder:
    """Make a decoder whose rows are the columns of ``definition``.

    Args:
        definition: the reader's schema, a record.
        registry: the registry of the writers' schemas, if records contain schema ids.
        column: ``value`` or ``key``.
        key: the key of the pipeline file that errors name.

    Raises:
        ConfigError: it is no Avro schema, or it has no columns.
    """
    try:
        parsed = AvroSchema.parse(definition)
    except NoSchema as error:
        raise ConfigError(key, f"this is no Avro schema: {error}") from None
    return AvroDecoder(
        schema=to_arrow(parsed, key=key),
        column=column,
        definition=definition,
        registry=registry,
    )


def latest_avro_decoder(
    registry: Registry, topics: Sequence[str], *, column: str = "value", key: str = "decode.schema"
) -> AvroDecoder:
    """Make a decoder of the newest schema of each topic's subject, ``<topic>-<column>``.

    Raises:
        ConfigError: a subject is missing, or two subjects have different columns.
        Unavailable: the registry does not answer.
    """
    way_out = f"give {key}, the path of a schema file (.avsc)"
    decoders: dict[str, AvroDecoder] = {}
    for subject in (f"{topic}-{column}" for topic in topics):
        try:
            latest = registry.latest(subject)
        except UnknownSchema as error:
            raise ConfigError(key, str(error), way_out=way_out) from None
        decoders[subject] = avro_decoder(latest, registry=registry, column=column, key=key)
    if not decoders:
        raise ConfigError(key, "without topics no subject", way_out=way_out)
    (subject, first), *others = decoders.items()
    for other, decoder in others:
        if decoder.schema != first.schema:
            problem = f"subjects {subject} and {other} have different columns"
            raise ConfigError(key, problem, way_out=way_out)
    newest = tuple((subject, decoder.definition) for subject, decoder in decoders.items())
    return replace(first, newest=newest)


_RANGED = ColumnLeaf(lambda values, arrow: checked(pa.array(values, arrow)))
_BY_INDEX = Columns(
    pick=lambda index, _: operator.itemgetter(index),
    leaves={arrow.id: _RANGED for arrow in (pa.date32(), pa.timestamp("us"), pa.time64("us"))},
)


# -- the registry ---------------------------------------------------------------------------

_T = TypeVar("_T")
_Place = tuple[str, int]
_ANSWER_SECONDS = 10
_RETRIES = 2  # of one request, by the client; then the batch fails and is repeated
_NOT_FOUND = 404
_MOST_REFERENCES = 1_000  # of a schema, also of its references: each costs a request
_REFUSED = (401, 403)
_SECRET = ("user.info", "password", "secret", "token")

# A cache for the tasks of a process, each of which has a new decoder: a registry never changes the
# schema of an id.
_known: dict[tuple[str, int], Definition] = {}

# Records may contain ids that were never registered, a new one in each record: the reasons, and
# until when the registry is not asked again. A pause after each answer bounds the requests a second
# and not those of a batch, because the schema of an id that was not asked for may exist.
_unknown: dict[tuple[str, int], tuple[str, float]] = {}
_MOST_UNKNOWN = 10_000
_UNKNOWN_SECONDS = 10
_PAUSE_SECONDS = 0.01

Newest = tuple[tuple[str, Definition], ...]
"""Subjects, and the newest schema of each."""

_compared: set[tuple[str, int, Newest]] = set()
"""The ids that were seen while the schemas of some subjects were the newest."""


class UnknownSchema(Exception):
    """The registry has no Avro schema with this id or subject; the message contains the reason."""


@dataclass(frozen=True)
class Registry:
    """A schema registry. Picklable; connects at the first request.

    Attributes:
        settings: ``url`` and other settings of confluent-kafka's SchemaRegistryClient, such as
            ``basic.auth.user.info``, ``ssl.ca.location``, ``bearer.auth.credentials.source``.
        key: the key of the pipeline file that errors name.
    """

    settings: Mapping[str, Any] = field(repr=False)
    key: str = "decode.schema_registry"

    def by_id(self, schema_id: int) -> Definition:
        """The schema with the id in a record. That it is unknown is remembered for 10 seconds.

        Raises:
            UnknownSchema: it is missing in the registry, or no Avro schema.
            Unavailable: no answer.
            ConfigError: the registry refuses the client.
        """
        place = str(self.settings["url"]), schema_id
        if place not in _known:
            why, until = _unknown.get(place, ("", 0.0))
            if monotonic() < until:
                raise UnknownSchema(why)
            what = f"schema id {schema_id}"
            try:
                found = self._ask(lambda: self._client.get().get_schema(schema_id), what)
                _known[place] = self._definition(found, what)
            except UnknownSchema as error:
                if len(_unknown) >= _MOST_UNKNOWN:
                    _unknown.clear()
                _unknown[place] = str(error), monotonic() + _UNKNOWN_SECONDS
                sleep(_PAUSE_SECONDS)
                raise
        return _known[place]

    def latest(self, subject: str) -> Definition:
        """The newest schema of a subject.

        Raises:
            UnknownSchema, Unavailable, ConfigError: see :meth:`by_id`.
        """
        what = f"subject {subject}"
        # A client keeps the first answer for its lifetime.
        found = self._ask(lambda: self._connected().get_latest_version(subject), what)
        return self._definition(found.schema, what)

    def refuse_newer(self, schema_id: int, newest: Newest) -> None:
        """When records have this id for the first time, check that the schemas of some subjects are
        still the newest.

        Raises:
            SchemaChanged: one of them is not.
            Unavailable, ConfigError: see :meth:`by_id`.
        """
        place = str(self.settings["url"]), schema_id, newest
        if place in _compared or self.by_id(schema_id) in (one for _, one in newest):
            return
        for subject, before in newest:
            try:
                same = self.latest(subject) == before
            except UnknownSchema:
                same = False
            if not same:
                raise SchemaChanged(
                    f"records with schema id {schema_id} have come, and subject {subject} has"
                    " another newest schema than at the start",
                    way_out="start again: the columns are derived from the newest schema",
                )
        _compared.add(place)

    def _definition(self, schema: Schema, what: str) -> Definition:
        kind = schema.schema_type or "AVRO"
        if kind != "AVRO":
            raise UnknownSchema(f"{what} is {kind}, not AVRO")
        texts: dict[_Place, str] = {}
        self._collect(schema, texts, what)
        return Definition(schema.schema_str, tuple(texts.values()))

    def _collect(self, schema: Schema, texts: dict[_Place, str], what: str, *way: _Place) -> None:
        """Collect schemas depth first, so that each text follows the texts whose types it refers
        to; ``way`` leads to the schema."""
        for reference in schema.references or ():
            place = reference.subject, reference.version
            if place in way or len(way) == DEEPEST or len(texts) >= _MOST_REFERENCES:
                raise UnknownSchema(f"{what} refers to itself or to too many schemas: {place[0]}")
            if place not in texts:
                inner = self._referred(*place)
                self._collect(inner, texts, what, *way, place)
                texts[place] = inner.schema_str

    def _referred(self, subject: str, version: int) -> Schema:
        what = f"subject {subject} version {version}"
        found = self._ask(lambda: self._client.get().get_version(subject, version), what)
        return found.schema

    @cached_property
    def _client(self) -> PerProcess[SchemaRegistryClient]:
        # A forked child must not use its parent's TLS connection: both would break it.
        return PerProcess(self._connected)

    def _connected(self) -> SchemaRegistryClient:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        conf = {"timeout": _ANSWER_SECONDS, "max.retries": _RETRIES, **self.settings}
        try:
            return SchemaRegistryClient(conf)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(
                self.key,
                self._said(error),
                way_out="it takes a url, or a table of url and the settings of "
                "confluent-kafka's SchemaRegistryClient",
            ) from None

    def _ask(self, question: Callable[[], _T], what: str) -> _T:
        require("registry", self.key, "a schema registry")
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return question()
        except ConfigError:
            raise
        except RecursionError:
            raise UnknownSchema(f"{what} is nested too deeply") from None
        except SchemaRegistryError as error:
            if error.http_status_code == _NOT_FOUND:
                raise UnknownSchema(f"the schema registry has no {what}") from None
            if error.http_status_code in _REFUSED:
                raise ConfigError(
                    self.key,
                    f"the schema registry refuses the client (HTTP {error.http_status_code})",
                    way_out="give basic.auth.user.info, or the user and password in the url",
                ) from None
            raise Unavailable(
                f"the schema registry failed on {what}: {self._said(error)}"
            ) from None
        except Exception as error:  # any error of its HTTP and OAuth clients: no answer
            kind = type(error).__name__
            raise Unavailable(
                f"no answer from the schema registry on {what}: {kind}: {self._said(error)}",
                way_out=f"check {self.key} and the network from here to it",
            ) from None

    def _said(self, error: Exception) -> str:
        return Secrets.of(_secrets(self.settings)).redact(str(error))

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": dict(self.settings), "key": self.key}


def _secrets(settings: Mapping[str, Any]) -> list[str]:
    found = [str(value) for name, value in settings.items() if name.endswith(_SECRET)]
    found += [part for value in found for part in value.split(":", 1)[1:]]
    for url in str(settings.get("url", "")).split(","):
        parts = urlsplit(url.strip())
        if parts.password:
            found += [parts.password, unquote(parts.password)]
    return found
