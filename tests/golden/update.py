"""Rewrites the golden files: ``python -m tests.golden.update``.

Stored formats are a promise: look at the difference, and say in the commit why it is meant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests.golden import writers
from tests.sinktools import Place, sqlite_place

FILES = writers.HERE / "files"


def made() -> writers.Golden:
    """All golden files, as today's code makes them."""
    found: writers.Golden = {}
    for build in writers.PLAIN.values():
        found |= build()
    with sqlite_place() as place:
        found |= writers.in_tables(place)
    with Postgres() as postgres:
        found |= writers.in_tables(Place(postgres.create_database("golden")))
    with Broker() as broker, TemporaryDirectory() as folder:
        found |= writers.in_topics(broker)
        found |= writers.in_files(broker, Path(folder))
        found |= writers.in_delta(Path(folder))
    return found


def main() -> int:
    """Write what differs, and name it."""
    found = made()
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        if old.name not in found:
            print("removed", old.name)
            old.unlink()
    for name, text in sorted(found.items()):
        file = FILES / name
        if not file.exists() or file.read_text() != text:
            print("written", name)
            file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
