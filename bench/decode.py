"""How fast records become columns on one core: ``python -m bench.decode``.

CPU seconds, not wall-clock, so that a busy machine doesn't count; the best of several rounds.
``pyarrow.json`` is what a joined buffer could give, without one outcome for one record.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.json

from bench.workload import AVRO, SCHEMA, avro_record, record
from oncely.decode.avro import avro_decoder
from oncely.decode.avro_schema import Definition
from oncely.decode.base import Decoder
from oncely.decode.json import JsonDecoder
from oncely.decode.reference import read_record
from oncely.decode.schema import parse_schema

BATCH = 20_000
ROUNDS = 15


def best(what: str, run: Callable[[], object], records: int = BATCH) -> None:
    """Print the best rate of several rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    print(f"{what:40} {records / min(seconds) / 1e6:6.2f} M records/s")


def decoding(decoder: Decoder, values: list[bytes]) -> Callable[[], object]:
    """Decode a batch, after a look whether it decodes at all."""
    records = pa.table({"value": pa.array(values, pa.binary())})
    print(f"  ({len(decoder.decode(records).rejections)} rejections in {len(values)} records)")
    return lambda: decoder.decode(records)


def main() -> None:
    """Print one line for each way."""
    schema = parse_schema(SCHEMA)
    values = [record(n) for n in range(BATCH)]
    spoilt = [b'{"time_hour": "yesterday"}' if n % 100 == 0 else v for n, v in enumerate(values)]
    joined = b"\n".join(values)
    parse = pyarrow.json.ParseOptions(explicit_schema=schema)
    one_thread = pyarrow.json.ReadOptions(use_threads=False)
    ours = JsonDecoder(schema)
    best("json, one batch of 20,000", decoding(ours, values))
    best("json, one batch of 10,000", decoding(ours, values[:10_000]), 10_000)
    best("json, 1 in 100 is bad", decoding(ours, spoilt))
    best("json, every record by the reference", lambda: [read_record(v, schema) for v in values])
    best(
        "pyarrow.json, joined buffer",
        lambda: pyarrow.json.read_json(io.BytesIO(joined), one_thread, parse),
    )
    avro = avro_decoder(Definition(json.dumps(AVRO)))
    best("avro, one batch of 20,000", decoding(avro, [avro_record(n) for n in range(BATCH)]))


if __name__ == "__main__":
    main()
