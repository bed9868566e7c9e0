"""``oncely init``: a pipeline file for a topic, from a sample of its records. Writes no record."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncely.config import parse
from oncely.config.base import passwords
from oncely.decode.schema import type_name
from oncely.errors import ConfigError, WrongInput
from oncely.kafka.client import at_start
from oncely.kafka.properties import SECRET
from oncely.kafka.source import sample
from oncely.pipeline.pipeline import Pipeline
from oncely.pipeline.proposal import Proposal, Records, propose, sink_of, table_of, written
from oncely.secrets import scope

_FILLED = re.compile(r"\$\{[^{}]+\}")
_BROKERS = "BROKERS"
_PASSWORD = "PASSWORD"  # noqa: S105 - the name of a variable


@dataclass(frozen=True)
class ProposalRequest:
    """The arguments of ``oncely init``.

    Attributes:
        brokers: ``host:port``, separated by commas; or ``${NAME}``.
        topic: the topic.
        to: the destination; None: a file of SQLite.
        registry: URL of a schema registry, or None.
        kafka: librdkafka's properties, ``${NAME}`` not filled in.
        sample: the number of records to read.
    """

    brokers: str
    topic: str
    to: str | None = None
    registry: str | None = None
    kafka: Mapping[str, str] = field(default_factory=dict)
    sample: int = 1000


def given_pipeline(wanted: ProposalRequest) -> Pipeline:
    """A pipeline with source and sink of the arguments, for its secrets and its source.

    Raises:
        ConfigError: an argument is invalid, or a package of the destination is not installed.
    """
    raw = _settings(wanted) | {"decode": {"format": "raw"}}
    given = Pipeline(parse(raw, of="the arguments"))
    given.require_packages()
    return given


def pipeline_file(wanted: ProposalRequest, given: Pipeline, name: str) -> str:
    """The text of a pipeline file that ``oncely plan`` accepts.

    Args:
        wanted: the arguments.
        given: the result of :func:`given_pipeline`.
        name: the name of the file, for its comments.

    Raises:
        TopicMissing: the topic is missing.
        WrongInput: it has no records.
        Unavailable: no answer from the broker, or from the registry.
    """
    with scope(given.secrets):
        records = _records(given, wanted)
        made = propose(_settings(wanted), records, wanted.registry)
        _without_unfit_key(made)
        if made.raw["decode"]["format"] == "avro":
            _avro_columns(made)
    made.raw["sink"] = _without_password(made)
    if unset := exports(wanted):
        made.raw["source"]["brokers"] = f"${{{_BROKERS}}}"
        made.behind["source.brokers"] = f"{unset} before"
    return written(made.raw, _head(wanted, records, name), made.above, made.behind)


def exports(wanted: ProposalRequest) -> str:
    """The shell command that sets the file's variable for the brokers; empty if ``--brokers`` names
    a variable."""
    return "" if "${" in wanted.brokers else f"export {_BROKERS}={shlex.quote(wanted.brokers)}"


def _settings(wanted: ProposalRequest) -> dict[str, Any]:
    source: dict[str, Any] = {
        "brokers": wanted.brokers,
        "topics": [wanted.topic],
        "start": "earliest",
    }
    for key, value in wanted.kafka.items():
        if key in SECRET and not _FILLED.search(value):
            raise ConfigError(
                "--kafka",
                f"the value of {key} is a secret, and would be in the file and in this command",
                way_out=f"write --kafka '{key}=${{{_variable(key)}}}', and export the variable",
            )
    if wanted.kafka:
        source["kafka"] = dict(wanted.kafka)
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", wanted.topic)[:100] or "pipeline"
    return {"name": name, "source": source, "sink": _sink(wanted)}


def _sink(wanted: ProposalRequest) -> dict[str, Any]:
    """The sink of ``--to``; if that is a variable, the file names the variable."""
    named = _FILLED.fullmatch(wanted.to or "")
    if named is None:
        return sink_of(wanted.to, wanted.topic)
    value = os.environ.get(named[0][2:-1])
    if value is None:
        raise ConfigError("--to", f"the environment has no variable {named[0][2:-1]}",
                          way_out="export it")  # fmt: skip
    sink = sink_of(value, wanted.topic)
    return sink | {"url": named[0]} if "url" in sink else sink


def _variable(key: str) -> str:
    return re.sub(r"\W", "_", key).upper()


@at_start()
def _records(pipeline: Pipeline, wanted: ProposalRequest) -> Records:
    found = sample(pipeline.source, wanted.sample)
    if not found.num_rows:
        raise WrongInput(
            f"topic {wanted.topic!r} has no committed records: there is nothing to propose from",
            way_out="produce some records first",
        )
    keys, values = found["key"].to_pylist(), found["value"].to_pylist()
    return Records(keys, values, compacted=bool(pipeline.source.compacted()))


def _without_unfit_key(made: Proposal) -> None:
    """No Avro key if the registry has no schema of it, or one that gives no columns."""
    decode = made.raw["decode"]
    if decode.get("key", {}).get("format") == "avro":
        try:
            _ = Pipeline(parse(made.raw)).decoder
        except ConfigError as error:
            del decode["key"]
            made.remark("decode.format", f"The key is left out: {error.message}")


def _avro_columns(made: Proposal) -> None:
    """Partitioning by the schema's first time."""
    schema = Pipeline(parse(made.raw)).decoder.schema
    columns = made.proposed.partition_by({one.name: type_name(one.type) for one in schema})
    if columns and not made.is_table:
        made.raw["sink"]["partition_by"] = columns


def _without_password(made: Proposal) -> dict[str, Any]:
    """The sink with a variable in place of the password of its URL."""
    sink = dict(made.raw["sink"])
    for one in passwords(sink.get("url", "")):
        if not _FILLED.search(one):
            sink["url"] = sink["url"].replace(f":{one}@", f":${{{_PASSWORD}}}@")
            made.behind["sink.url"] = f"export {_PASSWORD}=… before"
    return sink


def _head(wanted: ProposalRequest, records: Records, name: str) -> list[str]:
    return [
        f"Proposed by `oncely init` from {len(records.values):,} records of {wanted.topic}.",
        "Read it, then:",
        f"  oncely plan {name} --sample {wanted.sample}   (writes nothing)",
        f"  oncely run {name} --until latest",
    ]


def default_file(topic: str) -> Path:
    """The file that is written unless another one is named."""
    return Path(f"{table_of(topic)}.toml")
