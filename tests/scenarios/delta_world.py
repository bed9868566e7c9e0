"""What scenarios of the Delta sink share: a pipeline into a table, and a reader of its own.

The reader uses nothing of Oncely: delta-rs reads the table, and the rows are compared with the
source topic, record by record.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.deltatools import DeltaPlace
from tests.scenarios.files_world import FilesWorld
from tests.scenarios.world import assert_unbroken, produce, topic_content

SCHEMA = "id BIGINT, user STRING, ts TIMESTAMP, pad STRING"


@dataclass
class DeltaWorld(FilesWorld):
    """A topic of events, a Delta table, and one pipeline name."""

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline file's content; keyword arguments add to its sections."""
        raw = super().settings(**sections)
        own = {**self.overrides.get("sink", {}), **sections.get("sink", {})}
        raw["sink"] = {"kind": "delta", "url": self.url, "flush_interval": "0 seconds", **own}
        return raw

    @property
    def place(self) -> DeltaPlace:
        """The table, as an outsider looks at it."""
        return DeltaPlace(self.root, self.name)

    def positions(self) -> dict[int, int]:
        """As the newest commit of the pipeline tells them."""
        found = self.place.told()[0]["positions"].get(self.topic, {})
        return {int(number): at for number, at in found.items()}

    def publish_keyed(self, values: list[tuple[str, dict[str, Any] | None]]) -> None:
        """Records and tombstones by key, those of a key in one partition."""
        produce(
            self.brokers,
            self.topic,
            (
                (
                    sum(key.encode()) % 4,
                    key.encode(),
                    None if row is None else json.dumps(row).encode(),
                )
                for key, row in values
            ),
        )


def assert_exactly_once(world: DeltaWorld) -> int:
    """Each record of the source is one row of the table, or one dead letter; how many rows."""
    good: dict[int, tuple[int, int]] = {}
    bad: set[tuple[int, int]] = set()
    for at, text in topic_content(world.brokers, world.topic).items():
        try:
            good[json.loads(text or b"")["id"]] = at
        except (ValueError, KeyError, TypeError):
            bad.add(at)
    letters = Counter((number, offset) for _, number, offset in world.place.letters())
    ids = Counter(world.place.ids())
    wrong = {
        "lost": sorted(good.keys() - ids.keys())[:5],
        "doubled": sorted(i for i, n in ids.items() if n > 1)[:5],
        "invented": sorted(ids.keys() - good.keys())[:5],
        "letters lost": sorted(bad - letters.keys())[:5],
        "letters invented": sorted(letters.keys() - bad)[:5],
        "letters doubled": sorted(at for at, n in letters.items() if n > 1)[:5],
    }
    assert not any(wrong.values()), f"{len(good)} records: {wrong}"
    assert_unbroken(world)
    return len(good)
