"""``[sink]``: what the kinds of destinations have in common, and how the pipeline's settings find
those of a kind.

The settings of a kind are in its own package (``oncely.kinds.<kind>.settings``). Checks that
several kinds make are here and in :mod:`oncely.config.root`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from oncely.config.base import (
    PROPERTIES,
    Problem,
    RejectBudget,
    Rounding,
    Section,
    all_invalid,
    between,
    parse_seconds,
    plain_table,
    shown,
    written,
)
from oncely.config.decode import KeySettings, key_columns
from oncely.config.source import LONGEST_TOPIC, SourceSettings
from oncely.errors import ConfigError
from oncely.extras import KINDS, plugins
from oncely.kafka.properties import checked_producer


class SinkSettings(Section):
    """``[sink]`` of a kind of destination.

    A kind declares the keys that all kinds have at their place among its own: the reference shows
    them in that order.

    Attributes:
        kind: the kind of the destination.
        create: create what is missing at the destination.
        rounding: ``allow`` texts in JSON to lose digits beyond the microseconds of a TIMESTAMP;
            else the record is rejected.
        max_rejects: the reject budget, beyond which the pipeline stops; counted across restarts.
            ``"100%"`` never stops it.
    """

    infers: ClassVar[bool] = False
    """True if it accepts columns that are not known in advance."""

    examples: ClassVar[Mapping[str, str]] = {}
    """Examples of keys, each a line of TOML; keys that several kinds have may be in EXAMPLES."""

    if TYPE_CHECKING:
        kind: str
        create: bool
        rounding: Rounding
        max_rejects: RejectBudget

    @property
    def target(self) -> str:
        """The destination behind its kind, in a word, such as a table or a topic."""
        raise NotImplementedError

    @property
    def batch_seconds(self) -> float | None:
        """The seconds between the starts of batches; None for those of ``[spark]``."""
        return None

    @property
    def batch_records(self) -> int | None:
        """Maximum offsets of a batch by default; None for those of ``[spark]``."""
        return None

    def problems(self, pipeline: Any) -> list[Problem]:
        """What does not go with the rest of the file.

        Args:
            pipeline: the :class:`~oncely.config.pipeline.PipelineSettings` with this sink.

        Returns:
            Problems by keys that are dotted from the top of the file.
        """
        raise NotImplementedError


@cache
def sink_kinds() -> Mapping[str, type[SinkSettings]]:
    """The settings of every kind that is installed, by its name, in the order of the reference."""
    return {kind.name: kind.settings for kind in plugins(KINDS)}


class ByKind:
    """Marks a field for the settings of a kind. The kinds are imported when the schema of the field
    is built: their settings import :mod:`oncely.config`.
    """

    @staticmethod
    def annotation() -> Any:
        """The type of the field: one of the kinds."""
        return Annotated[reduce(or_, sink_kinds().values()), Field(discriminator="kind")]

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.annotation())


@written(PROPERTIES)
def producer_keys(value: object) -> dict[str, str]:
    """``[sink.kafka]``, each key checked; settings that would weaken the producer are refused."""
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for key, given in plain_table(value).items():
        try:
            found |= checked_producer({key: given})
        except ConfigError as error:
            problems.append(Problem(key, error.problem, error.way_out))
    if problems:
        raise all_invalid(problems)
    return found


transaction_seconds = between(
    parse_seconds,
    10,
    900,
    "10 seconds to 15 minutes",
    "stay below the broker's transaction.max.timeout.ms, 15 minutes by default",
)


def topic_problems(source: SourceSettings, topics: Sequence[str], key: str) -> list[Problem]:
    """Problems of a sink that writes to the source's cluster.

    Args:
        source: the topics that are read.
        topics: the topics that it writes to.
        key: the dotted key of the first, from which names of others are derived.
    """
    found = [
        Problem(key, f"writes to {name}, which source.topics reads: it would never end",
                "write to another topic")
        for name in topics
        if name in source.topics
    ]  # fmt: skip
    found += [
        Problem(key, f"the name of the topic {shown(name)} that is derived from it has more than"
                f" {LONGEST_TOPIC} characters", "name that topic itself, or use a shorter name")
        for name in topics
        if len(name) > LONGEST_TOPIC
    ]  # fmt: skip
    if not source.group and source.group is not None:
        found.append(
            Problem("source.group", "is switched off, and this sink commits offsets to the group",
                    "remove it, or name a group")
        )  # fmt: skip
    return found


def server_problems(source: SourceSettings, url: str) -> list[Problem]:
    """Problems of the URL of a database: it must not lead to a broker."""
    here = f"{url}/".replace("localhost", "127.0.0.1")
    return [
        Problem("sink.url", f"leads to {broker}, which is one of source.brokers",
                "write host and port of the database here, and those of Kafka there")
        for broker in source.brokers.replace("localhost", "127.0.0.1").split(",")
        if f"@{broker}/" in here or f"//{broker}/" in here
    ]  # fmt: skip


def upsert_problems(mode: str, keys: tuple[str, ...], version: str | None) -> list[Problem]:
    """Keys and version that don't go with the mode."""
    found = []
    if mode == "upsert" and not keys:
        found.append(Problem("keys", "is missing; an upsert finds its row by them",
                             'name the columns: keys = ["id"]'))  # fmt: skip
    if mode == "append":
        given = {"keys": keys, "version": version}
        found += [
            Problem(name, 'has no meaning with mode = "append"', 'remove it, or mode = "upsert"')
            for name, value in given.items()
            if value
        ]
    if len(set(keys)) != len(keys):
        found.append(Problem("keys", "names a column more than once", "name each column once"))
    if version is not None and version in keys:
        found.append(Problem("version", "is one of the keys, so it never differs",
                             "name a column that grows with each change"))  # fmt: skip
    return found


def key_problems(key: KeySettings | None, mode: str, keys: tuple[str, ...]) -> list[Problem]:
    """The keys of an upsert must come from the record's key, or a tombstone could not delete.

    Args:
        key: the decoding of the record's key.
        mode, keys: of the sink.
    """
    if mode != "upsert":
        return []
    if key is None:
        return [Problem("decode.key", 'is missing; with mode = "upsert" a record without a value'
                        " deletes by its key",
                        'add [decode.key], such as format = "string", column = "id"')]  # fmt: skip
    columns = key_columns(key)
    if columns is None or set(columns) == set(keys):
        return []
    return [Problem("sink.keys", f"found {', '.join(keys)}, but decode.key gives"
                    f" {', '.join(columns)}", "name the same columns in both")]  # fmt: skip
