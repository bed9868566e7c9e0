"""The inputs of the fuzz targets: ``python native/fuzz/corpus.py prepare|compare FOLDER``.

``prepare`` writes the columns and plans that the targets use, and first inputs. ``compare`` decodes
all inputs that the fuzzer has kept with ``oncely-native`` and with the references in Python; both
must have the same rows, rejections and reasons.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oncely.decode.avro import AvroDecoder, Registry, avro_decoder
from oncely.decode.avro_schema import Definition
from oncely.decode.columns import layout_of
from oncely.decode.reference import JsonRules
from tests.properties import test_native_decoders as known
from tests.registrytools import running

SCHEMAS = [known.FLAT, known.corpus.SCHEMA]
BATCH = 10_000
EMPTY: dict[str, Any] = {"type": "array", "items": {"type": "fixed", "name": "Z", "size": 0}}
BOUNDED: dict[str, Any] = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "wanted", "type": EMPTY},
        {"name": "gone", "type": {"type": "array", "items": {"type": "array", "items": "null"}}},
    ],
}
"""A schema with items that take no bytes."""


@contextmanager
def avro_decoders() -> Iterator[list[tuple[AvroDecoder, bytes]]]:
    """Decoders, and what precedes a datum: of values without bytes, without a registry, and to
    columns of another schema."""
    with running() as server:
        head = b"\0" + server.add(known.AVRO).to_bytes(4, "big")
        registry = Registry({"url": server.url})
        empty = b"\0" + server.add(BOUNDED).to_bytes(4, "big")
        wanted = Definition(json.dumps(BOUNDED | {"fields": BOUNDED["fields"][:1]}))
        yield [
            (avro_decoder(wanted, registry=registry), empty),
            (avro_decoder(Definition(json.dumps(known.AVRO))), b""),
            (avro_decoder(Definition(json.dumps(known.PROMOTED)), registry=registry), head),
        ]


def prepare(folder: Path) -> None:
    """Write for each target what it is given, and its first inputs."""
    layouts = [layout_of(schema) for schema in SCHEMAS]
    with avro_decoders() as decoders:
        plans = [(layout_of(decoder.schema), decoder._plan(head)) for decoder, head in decoders]
    rng = random.Random(1)
    records = [
        bytes([at << 2 | rules]) + b"\n".join(filter(None, known.json_records(rng, schema)[:3]))
        for at, schema in enumerate(SCHEMAS)
        for rules in range(4)
        for _ in range(20)
    ]
    datums = [bytes([at % len(plans)]) + datum for at, datum in enumerate(known.datums(rng, 200))]
    for name, given, inputs in [("json", layouts, records), ("avro", plans, datums)]:
        seeds = folder / name / "inputs"
        seeds.mkdir(parents=True, exist_ok=True)
        (folder / name / "given").write_text(repr(given))
        for at, data in enumerate(inputs):
            (seeds / f"first-{at}").write_bytes(data)


def kept(folder: Path) -> dict[int, list[bytes]]:
    """Inputs without their first byte, by this byte."""
    found: dict[int, list[bytes]] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if data:
            found.setdefault(data[0], []).append(data[1:])
    return found


def compare(folder: Path) -> None:
    """Decode all inputs both ways.

    Raises:
        AssertionError: the results differ.
    """
    records = datums = 0
    for choice, inputs in kept(folder / "json" / "inputs").items():
        schema = SCHEMAS[(choice >> 2) % len(SCHEMAS)]
        rules = JsonRules(strict=bool(choice & 1), rounding=bool(choice & 2))
        lines = list({line for data in inputs for line in data.split(b"\n")})
        for at in range(0, len(lines), BATCH):
            known.check_json(lines[at : at + BATCH], schema, rules)
        records += len(lines)
    with avro_decoders() as decoders, pytest.MonkeyPatch.context() as patch:
        for choice, inputs in kept(folder / "avro" / "inputs").items():
            decoder, head = decoders[choice % len(decoders)]
            framed = [head + datum for datum in inputs]
            for at in range(0, len(framed), BATCH):
                known.check_avro(decoder, framed[at : at + BATCH], patch)
            datums += len(inputs)
    print(f"{records} records of JSON and {datums} datums of Avro: equal")


if __name__ == "__main__":
    {"prepare": prepare, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
