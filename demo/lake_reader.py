"""The independent reader of the lake: does the manifest name each record of the topic once?

As :mod:`demo.reader`, it shares no code with the pipeline. The manifest is followed by a plain
``read_committed`` consumer, files are read by fastavro, records are judged by
:mod:`demo.lake_rules`. It runs as a process of its own and tells in its answer whether Oncely was
in it.

A file that is named and is not there, or is another one, gives no rows: its records are lost. What
lies in the folders and is not named is an orphan, whatever it holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fastavro
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from demo.lake_rules import Row, folder_of, row_of
from demo.reader import Place, messages, stable_ends

_BROKERS = "READER_BROKERS"
_OWN = ("_oncely/", "./_READ_THE_MANIFEST.txt")  # what Oncely keeps about the root

Entry = dict[str, Any]
"""What the manifest says of a file."""


@dataclass
class Verdict:
    """The count.

    Attributes:
        records: in the topic, as a read_committed reader gets them.
        manifest_rows: rows of all files, as the manifest says.
        rows: that were read from those files.
        rejects: dead letters.
        lost: records that are neither a row of a named file nor a dead letter.
        duplicated: rows and dead letters that are there once more than they should be.
        changed: rows that differ from their record or are in another folder, dead letters with
            other bytes.
        unexpected: rows of no record (broken or never committed), dead letters of no broken one.
        broken_files: named, and not there or not as the manifest says.
        files: that the manifest names.
        schemas: that were published, one for each carrier.
        examples: the first few of what is wrong, in words.
    """

    records: int = 0
    manifest_rows: int = 0
    rows: int = 0
    rejects: int = 0
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    unexpected: int = 0
    broken_files: int = 0
    files: int = 0
    schemas: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, example: str) -> None:
        """Keep an example, as long as there are few."""
        if len(self.examples) < 10:
            self.examples.append(example)


# -- the topics ----------------------------------------------------------------------------


def read_source(
    brokers: str, topic: str, start: float
) -> tuple[dict[int, Row], dict[Place, bytes | None]]:
    """The topic's readable records: id to the row it must become, place to a broken one's bytes.

    Args:
        brokers: ``host:port``.
        topic: whose.
        start: seconds since 1970; in each partition the first record that is not older begins it.

    Raises:
        ValueError: an id is repeated, so rows could not be told apart.
    """
    good: dict[int, Row] = {}
    broken: dict[Place, bytes | None] = {}
    ends = stable_ends(brokers, topic)
    for message in messages(brokers, topic, ends, _begins(brokers, topic, ends, start)):
        row = row_of(message.value())
        if row is None:
            broken[message.partition(), message.offset()] = message.value()
        elif row["id"] in good:
            raise ValueError(f"id {row['id']} is in the topic twice")
        else:
            good[row["id"]] = row
    if stable_ends(brokers, topic) != ends:
        raise RuntimeError(f"topic {topic} grew while it was read: both ends must stand still")
    return good, broken


def _begins(brokers: str, topic: str, ends: Mapping[int, int], start: float) -> dict[int, int]:
    spec = OffsetSpec.for_timestamp(round(start * 1000))
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 2})  # must outlive the answers
    asked = admin.list_offsets(
        {TopicPartition(topic, number): spec for number in ends}, request_timeout=30
    )
    found = {one.partition: answer.result().offset for one, answer in asked.items()}
    return {number: ends[number] if at < 0 else at for number, at in found.items()}  # -1: none


def read_manifest(brokers: str, topic: str) -> dict[str, Entry]:
    """The files of the table: path to entry."""
    found: dict[str, Entry] = {}
    for message in messages(brokers, topic, stable_ends(brokers, topic)):
        path = message.key().decode()
        if path.startswith("["):  # the topic's owner
            continue
        if message.value() is None:
            found.pop(path, None)
            continue
        entry = json.loads(message.value())
        for old in entry["replaces"]:
            found.pop(old, None)
        found[path] = entry
    return found


def read_letters(brokers: str, topic: str) -> list[tuple[Place, bytes | None]]:
    """Dead letters: where each record stood, and its bytes."""
    letters = []
    for message in messages(brokers, topic, stable_ends(brokers, topic)):
        headers = dict(message.headers())
        place = int(headers["oncely.partition"]), int(headers["oncely.offset"])
        letters.append((place, message.value()))
    return letters


# -- the folder ----------------------------------------------------------------------------


def stored(root: Path) -> set[str]:
    """Every file below the root, but those about the root."""
    found: set[str] = set()
    for folder, _, names in os.walk(root):
        below = os.path.relpath(folder, root)
        found.update(f"{below}/{name}" for name in names)
    return {path for path in found if not path.startswith(_OWN)}


def rows_of(file: Path, entry: Entry) -> list[Row]:
    """A file's rows, nulls left out.

    Raises:
        ValueError: it is not what the manifest says.
        OSError: it can't be read.
    """
    data = file.read_bytes()
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError("its bytes are others")
    rows = [row for row in fastavro.reader(io.BytesIO(data)) if isinstance(row, dict)]
    if len(rows) != entry["rows"]:
        raise ValueError(f"it has {len(rows)} rows, and {entry['rows']} are named")
    return [{name: one for name, one in row.items() if one is not None} for row in rows]


# -- the comparison ------------------------------------------------------------------------


def compare(
    good: Mapping[int, Row],
    broken: Mapping[Place, bytes | None],
    manifest: Mapping[str, Entry],
    letters: Iterable[tuple[Place, bytes | None]],
    root: Path,
) -> Verdict:
    """Compare record by record: rows by id, by every value and by folder; rejects by bytes."""
    verdict = Verdict(len(good) + len(broken), files=len(manifest))
    seen: set[int] = set()
    for path, entry in manifest.items():
        verdict.manifest_rows += entry["rows"]
        try:
            rows = rows_of(root / path, entry)
        except (OSError, ValueError, EOFError) as error:
            verdict.broken_files += 1
            verdict.note(f"{path}: {error}")
            continue
        verdict.rows += len(rows)
        for row in rows:
            _compare_row(row, path, good, seen, verdict)
    for lost in good.keys() - seen:
        verdict.lost += 1
        verdict.note(f"id {lost} is in no named file")
    _compare_letters(broken, letters, verdict)
    return verdict


def _compare_row(
    row: Row, path: str, good: Mapping[int, Row], seen: set[int], verdict: Verdict
) -> None:
    number = row.get("id")
    wanted = good.get(number)  # type: ignore[arg-type]
    if wanted is None or number is None:
        verdict.unexpected += 1
        verdict.note(f"{path} has a row with id {number}, but no readable flight has that id")
        return
    if number in seen:
        verdict.duplicated += 1
        verdict.note(f"id {number} is in a file again: {path}")
    elif row != wanted or path.rpartition("/")[0] != folder_of(wanted):
        verdict.changed += 1
        verdict.note(f"{path}: id {number} differs: {row!r} for {wanted!r}")
    seen.add(number)


def _compare_letters(
    broken: Mapping[Place, bytes | None],
    letters: Iterable[tuple[Place, bytes | None]],
    verdict: Verdict,
) -> None:
    seen: set[Place] = set()
    for place, value in letters:
        verdict.rejects += 1
        if place not in broken:
            verdict.unexpected += 1
            verdict.note(f"a dead letter of {place}, but no broken record is there")
        elif place in seen:
            verdict.duplicated += 1
            verdict.note(f"the record at {place} is a dead letter twice")
        elif value != broken[place]:
            verdict.changed += 1
            verdict.note(f"the dead letter of {place} has other bytes than the record")
        seen.add(place)
    for lost in broken.keys() - seen:
        verdict.lost += 1
        verdict.note(f"the broken record at {lost} is no dead letter")


# -- a process of its own ------------------------------------------------------------------


def environment(brokers: str) -> dict[str, str]:
    """The environment of ``python -m demo.lake_reader``."""
    return {**os.environ, _BROKERS: brokers}


def main(arguments: list[str]) -> None:
    """``count SOURCE MANIFEST SCHEMAS REJECTS START ROOT`` or ``look MANIFEST ROOT``; print JSON.

    ``count`` compares everything, ``look`` only which files are there. Both list the orphans.
    """
    what, *topics, folder = arguments
    brokers, root = os.environ[_BROKERS], Path(folder)
    answer: dict[str, Any] = {}
    if what == "count":
        source, manifest_topic, schemas, rejects, start = topics
        good, broken = read_source(brokers, source, float(start))
        manifest = read_manifest(brokers, manifest_topic)
        letters = read_letters(brokers, rejects)
        verdict = compare(good, broken, manifest, letters, root)
        ends = stable_ends(brokers, schemas)
        verdict.schemas = len({message.key() for message in messages(brokers, schemas, ends)})
        answer = asdict(verdict)
    else:
        manifest = read_manifest(brokers, *topics)
    there = stored(root)
    orphans = sorted(there - manifest.keys())
    answer["orphans"] = orphans
    answer["newest_orphan"] = max(((root / one).stat().st_mtime for one in orphans), default=None)
    answer["missing"] = len(manifest.keys() - there)
    answer["pipeline_code_imported"] = any(name.split(".")[0] == "oncely" for name in sys.modules)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
