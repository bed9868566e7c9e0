"""Files in the trials of ``oncely semantics``: their store and the manifest's producer have faults.

Files are staged first, in a task, so the store kills from a worker. The commit begins after that,
in the driver: it *publishes* them in the manifest topic, and only that makes their records take
effect.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro

from oncely.kinds.trial import (
    ARRIVING,
    BEFORE,
    COMMIT,
    POSITION,
    RECORDS,
    STAGING,
    Killer,
    KillingClients,
    KillingProducer,
    KillingStores,
    Place,
    Trial,
)

NAMING = "half the files named"


@dataclass
class KillingNames(KillingClients):
    """``Parts.kafka_connect`` for a files sink; its topic is the manifest."""

    def producer(self, made: Any) -> KillingProducer:
        """The producer with the fault."""
        return _Namer(made, self.killer, self.topic)


class _Namer(KillingProducer):
    """A producer that tracks the published files of a batch."""

    def __init__(self, inner: Any, killer: Killer, topic: str) -> None:
        super().__init__(inner, killer, topic)
        self._files, self._named = killer.files, 0

    def begin_transaction(self) -> Any:
        if self._killer.together:
            self._killer.at(BEFORE)
        return self._inner.begin_transaction()

    def produce(self, topic: str, value: Any, key: Any, **more: Any) -> None:
        names = topic == self._topic and not key.startswith(
            b"["
        )  # not an owner record of the topic
        if names and not self._named and not self._killer.position_first:
            self._killer.at(BEFORE)
        self._inner.produce(topic, value, key, **more)
        if names:
            self._named += 1
            self._records = True
            half, all_ = self._named == self._files // 2, self._named == self._files
            if (half and self._killer.wants(NAMING)) or (
                all_ and self._killer.together and self._killer.wants(RECORDS)
            ):
                self._inner.flush(ARRIVING)
                self._killer.end()

    def flush(self, *timeout: float) -> Any:
        self._named = 0  # without transactions it serves the next batch as well
        return super().flush(*timeout)


def _sink(place: Place, name: str) -> dict[str, Any]:
    return {
        "kind": "files",
        "url": place.root("files", name).as_uri(),
        "partition_by": ["team"],
        "manifest_topic": f"{name}.manifest",
        # Separate topics: an open transaction after a kill hides the following messages
        # from others, and trials of other sinks run in parallel.
        "ledger_topic": "files.ledger",
        "flush_interval": "0 seconds",
    }


def _faulty(killer: Killer, sink: Mapping[str, Any]) -> dict[str, Any]:
    names = KillingNames(killer, sink["manifest_topic"])
    return {"kafka_connect": names, "files_connect": KillingStores(killer)}


def _found(place: Place, name: str) -> Counter[int]:
    """The ids in the Avro files of the manifest topic.

    Other files below the root are ignored. A listed file that is missing or has another checksum
    contributes no ids: its records count as lost.
    """
    named: dict[str, Mapping[str, Any]] = {}
    for message in place.messages(f"{name}.manifest"):
        path, value = message.key().decode(), message.value()
        if path.startswith("["):  # the topic's owner
            continue
        if value is None:
            named.pop(path, None)
        else:
            named[path] = json.loads(value)
    found: Counter[int] = Counter()
    for path, entry in named.items():
        found.update(_ids(place.root("files", name) / path, entry))
    return found


def _ids(file: Path, entry: Mapping[str, Any]) -> list[int]:
    """The ids in a file; none if it differs from its manifest entry."""
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            return []
        ids = [row["id"] for row in fastavro.reader(io.BytesIO(data))]
    except (OSError, ValueError, EOFError, KeyError):
        return []
    return ids if len(ids) == entry["rows"] else []


TRIAL = Trial(
    title="Into files",
    points=(*STAGING, BEFORE, NAMING, RECORDS, POSITION, COMMIT),
    sink=_sink,
    faulty=_faulty,
    found=_found,
    in_files=True,
    note="A task writes files; then the driver lists them in the manifest topic, and only "
    "listed files have taken effect. So “after the records” is: after all files are named."
    " What a kill leaves unnamed is no part of the table, and nobody reads it.",
)
