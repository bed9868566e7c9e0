"""How fast records become columns on one core: ``python -m bench.decode``.

CPU seconds, not wall-clock, so that a busy machine doesn't count; the best of several rounds.
``pyarrow.json`` is what a joined buffer could give, without one outcome for one record.
"""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.json

from oncely.decode.avro import avro_decoder
from oncely.decode.avro_schema import Definition
from oncely.decode.base import Decoder
from oncely.decode.json import JsonDecoder
from oncely.decode.reference import read_record
from oncely.decode.schema import parse_schema

DDL = "carrier STRING, flight INT, year INT, time_hour TIMESTAMP, dep_delay DOUBLE"
AVRO = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "carrier", "type": ["null", "string"]},
        {"name": "flight", "type": ["null", "int"]},
        {"name": "year", "type": "int"},
        {"name": "time_hour", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "dep_delay", "type": ["null", "double"]},
    ],
}
BATCH = 20_000
ROUNDS = 15


def json_value(n: int) -> bytes:
    """A record of about 100 bytes."""
    at = datetime(2013, 1, 1) + timedelta(hours=n % 8760)
    flight = {
        "carrier": ("UA", "AA", "B6", "DL")[n % 4],
        "flight": n % 9000,
        "year": 2013,
        "time_hour": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "dep_delay": (None, 2.0, -3.0, 17.5)[n % 7 % 4],
    }
    return json.dumps(flight).encode()


def avro_value(n: int) -> bytes:
    """The same flight, always with a delay: its varints are written out."""
    number = (n % 9000 + 64) << 1
    head = b"\x02\x04UA\x02" + bytes(
        (number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14)
    )
    return head + b"\xba\x1f" + b"\x80\x80\xc4\xd1\xfdN" + b"\x02" + struct.pack("<d", 2.0)


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
    schema = parse_schema(DDL)
    values = [json_value(n) for n in range(BATCH)]
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
    best("avro, one batch of 20,000", decoding(avro, [avro_value(n) for n in range(BATCH)]))


if __name__ == "__main__":
    main()
