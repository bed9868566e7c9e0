"""From what the pipeline file says under ``decode`` to the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oncely.config import AvroDecode, AvroKey, DecodeSettings, JsonDecode, JsonKey, TextKey
from oncely.decode.base import Decoder
from oncely.decode.build import KeySpec, build_decoder
from oncely.sinks.files.form import VALUE


def decoder_of(decode: DecodeSettings, topics: Sequence[str]) -> Decoder:
    """The decoder that the settings describe.

    Raises:
        ConfigError: the schema and the records' format don't go together.
        Unavailable: the schema registry does not answer.
    """
    if isinstance(decode, JsonDecode) and decode.inferred:
        return build_decoder("raw", columns=(VALUE,), topics=topics)  # the sink finds the columns
    key = None if decode.key is None else _key(decode.key)
    if isinstance(decode, JsonDecode):
        return build_decoder("json", decode.schema_ddl, topics=topics, key=key)
    if isinstance(decode, AvroDecode):
        schema = None if decode.schema_file is None else str(decode.schema_file)
        registry = _registry(decode)
        return build_decoder("avro", schema, schema_registry=registry, topics=topics, key=key)
    return build_decoder("raw", columns=decode.columns, topics=topics, key=key)


def _key(key: JsonKey | AvroKey | TextKey) -> KeySpec:
    if isinstance(key, TextKey):
        return KeySpec("string", name=key.column)
    if isinstance(key, JsonKey):
        return KeySpec("json", key.schema_ddl)
    schema = None if key.schema_file is None else str(key.schema_file)
    return KeySpec("avro", schema, schema_registry=_registry(key))


def _registry(avro: AvroDecode | AvroKey) -> dict[str, Any] | None:
    """The registry client's own names (confluent-kafka's SchemaRegistryClient)."""
    if avro.schema_registry is None:
        return None
    settings: dict[str, Any] = {"url": avro.schema_registry}
    if avro.schema_registry_user_info is not None:
        settings["basic.auth.user.info"] = avro.schema_registry_user_info.get_secret_value()
    if avro.schema_registry_ca is not None:
        settings["ssl.ca.location"] = str(avro.schema_registry_ca)
    return settings
