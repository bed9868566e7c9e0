"""Creates the decoder from ``[decode]`` of the pipeline file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from oncely.config import (
    AvroDecode,
    AvroKey,
    DecodeSettings,
    JsonDecode,
    JsonKey,
    RawDecode,
    TextKey,
)
from oncely.decode.base import Decoder
from oncely.decode.json import JsonDecoder
from oncely.decode.metadata import RawDecoder, TextDecoder, WithKey, WithMetadata
from oncely.decode.schema import parse_schema
from oncely.errors import ConfigError

if TYPE_CHECKING:
    from oncely.decode.avro import AvroDecoder


def decoder_of(decode: DecodeSettings, topics: Sequence[str], *, rounding: bool = False) -> Decoder:
    """The decoder of the settings.

    Args:
        decode: the section of the pipeline file.
        topics: the source's topics.
        rounding: values may lose digits that their columns do not keep.

    Raises:
        ConfigError: the schema does not fit the records' format.
        Unavailable: the schema registry does not answer.
    """
    if isinstance(decode, JsonDecode) and decode.inferred:
        from oncely.kinds.data_file import VALUE

        return RawDecoder((VALUE,))  # the sink infers the columns
    made = _decoder(decode, "value", "decode", topics, rounding)
    if decode.key is not None:
        made = WithKey(made, _decoder(decode.key, "key", "decode.key", topics, rounding))
    return made if decode.metadata is None else WithMetadata(made, decode.metadata.parts)


def _decoder(
    settings: DecodeSettings | JsonKey | AvroKey | TextKey,
    column: Literal["value", "key"],
    path: str,
    topics: Sequence[str],
    rounding: bool,
) -> Decoder:
    match settings:
        case RawDecode():
            return RawDecoder(settings.columns)
        case TextKey():
            unwrap, is_json = settings.unwrap or "", settings.json_value
            return TextDecoder(key_schema(settings), column, rounding, unwrap, is_json)
        case JsonDecode() | JsonKey():
            schema = parse_schema(settings.schema_ddl, key=f"{path}.schema")
            strict, unwrap = settings.strict, settings.unwrap or ""
            return JsonDecoder(schema, column, strict, rounding, unwrap)
        case AvroDecode() | AvroKey():
            return _avro(settings, column, path, topics)


def key_schema(key: TextKey) -> pa.Schema:
    """The column of a key that is a text."""
    kind = parse_schema(f"x {key.type}").field(0).type
    return pa.schema({key.column: kind})


def _avro(avro: AvroDecode | AvroKey, column: str, path: str, topics: Sequence[str]) -> AvroDecoder:
    from oncely.decode.avro import Registry, avro_decoder, latest_avro_decoder
    from oncely.decode.avro_schema import Definition

    key = f"{path}.schema"
    if avro.schema_file is None:
        registry = Registry(_registry(avro), f"{path}.schema_registry")
        return latest_avro_decoder(registry, topics, column=column, key=key)
    try:
        text = avro.schema_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"can't read the schema file {avro.schema_file}: {error}"
        raise ConfigError(key, problem) from None
    return avro_decoder(Definition(text), column=column, key=key)


def _registry(avro: AvroDecode | AvroKey) -> dict[str, Any]:
    """The settings of confluent-kafka's SchemaRegistryClient."""
    settings: dict[str, Any] = {"url": avro.schema_registry}
    if avro.schema_registry_user_info is not None:
        settings["basic.auth.user.info"] = avro.schema_registry_user_info.get_secret_value()
    if avro.schema_registry_ca is not None:
        settings["ssl.ca.location"] = str(avro.schema_registry_ca)
    return settings
