"""Schemas by id from a Confluent-compatible schema registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from oncely.decode.avro_schema import DEEPEST, Definition
from oncely.errors import ConfigError, SchemaChanged, Unavailable
from oncely.extras import require
from oncely.per_process import PerProcess
from oncely.secrets import Secrets

if TYPE_CHECKING:
    # The client brings HTTP and OAuth packages: only pipelines with a registry import it.
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

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
