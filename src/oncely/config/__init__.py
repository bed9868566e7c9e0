"""The pipeline file, parsed and checked into typed, frozen values.

    settings = load("flights.toml")
    settings.sink.table          # TableName(schema='public', name='flights')
    settings.describe()          # JSON-able, without a secret

All problems are raised together as one :class:`oncely.errors.ConfigError` that names every key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oncely.config.base import CommitInterval, RejectBudget
from oncely.config.decode import (
    AvroDecode,
    AvroKey,
    DecodeSettings,
    JsonDecode,
    JsonKey,
    RawDecode,
    TextKey,
)
from oncely.config.pipeline import PipelineSettings, TransformSettings
from oncely.config.problems import checked, explain, joined
from oncely.config.root import S3Settings
from oncely.config.runtimes import SparkSettings, WorkerSettings
from oncely.config.secrecy import Filling, public, written
from oncely.config.sink import SinkSettings
from oncely.config.source import (
    FileOffsets,
    FilterSettings,
    KafkaOffsets,
    LedgerOffsets,
    OffsetsSettings,
    RedisOffsets,
    SourceSettings,
    SqlOffsets,
    ZooKeeperOffsets,
)
from oncely.errors import ConfigError
from oncely.secrets import Secrets, scope

__all__ = [
    "AvroDecode",
    "AvroKey",
    "CommitInterval",
    "DecodeSettings",
    "FileOffsets",
    "FilterSettings",
    "JsonDecode",
    "JsonKey",
    "KafkaOffsets",
    "LedgerOffsets",
    "OffsetsSettings",
    "PipelineSettings",
    "RawDecode",
    "RedisOffsets",
    "RejectBudget",
    "S3Settings",
    "SinkSettings",
    "SourceSettings",
    "SparkSettings",
    "SqlOffsets",
    "TextKey",
    "TransformSettings",
    "WorkerSettings",
    "ZooKeeperOffsets",
    "load",
    "loads",
    "parse",
]


@checked
def load(path: str | Path) -> PipelineSettings:
    """Read a pipeline file.

    Args:
        path: a TOML file; relative paths inside it are relative to its folder.

    Raises:
        ConfigError: it cannot be read, is no TOML, or describes no valid pipeline; names each key.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            str(path), f"can't read the pipeline file: {error.strerror}", way_out="check the path"
        ) from None
    return loads(data, base=path.parent, of=str(path))


def loads(data: bytes, *, base: Path, of: str) -> PipelineSettings:
    """Check the content of a pipeline file.

    Args:
        data: TOML.
        base: the base of relative paths.
        of: the file's name, for messages.

    Raises:
        ConfigError: as :func:`load`.
    """
    try:
        raw = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(of, "not UTF-8 text", way_out="save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # also long numbers, deep nesting
        raise ConfigError(
            of,
            f"not TOML: {error}",
            way_out='texts are quoted; a key that also has keys below it is quoted: "a.b" = 1',
        ) from None
    return parse(raw, base=base, of=of)


@checked
def parse(
    raw: Mapping[str, Any], *, base: Path | None = None, of: str = "the pipeline"
) -> PipelineSettings:
    """Check a pipeline that is given as a mapping in the structure of the file.

    Args:
        raw: the tables of the file.
        base: the base of relative paths; the working directory by default.
        of: the file's name in a message about several problems.

    Raises:
        ConfigError: names every invalid key, its value, and the way out.
    """
    base = Path() if base is None else base
    filling = Filling(base)
    filled = filling.fill(raw)
    if filling.problems:  # texts that could not be filled in look like passwords
        with scope(Secrets.of(filling.secrets)):
            raise joined(filling.problems, of)
    secrets = Secrets.of([*filling.secrets, *written(filled)], public(filled))
    with scope(secrets):  # for the messages of all checks
        try:
            return PipelineSettings.model_validate(
                filled, context={"base": base, "secrets": secrets}
            )
        except ValidationError as error:
            # From None: pydantic's own text contains less, and would appear above ours.
            raise joined(explain(error, filled), of) from None
