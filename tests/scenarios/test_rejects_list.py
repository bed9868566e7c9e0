"""`oncely rejects list`: grouped by reason, and filtered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncely.testing.servers.kafka import Broker
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import toml

VALUES = ['{"id": 1}', "{", '{"id": "a"}', '{"id": "b"}', '{"id": 2}', '{"id": "c"}', "nope"]


@pytest.fixture(params=["sql", "kafka"])
def file(request: Any, broker: Broker, make_topic: Any, tmp_path: Path) -> Path:
    """A pipeline with two rows and five rejects for two reasons."""
    topic = make_topic(partitions=2, records=[(i % 2, "k", v) for i, v in enumerate(VALUES)])
    sinks = {
        "sql": {"kind": "sql", "url": f"sqlite:///{tmp_path}/rows.db", "table": "rows"},
        "kafka": {"kind": "kafka", "topic": f"{topic}.out", "ledger_topic": f"{topic}.ledger"},
    }
    file = tmp_path / "p.toml"
    settings = {
        "name": topic,
        "source": {"brokers": broker.bootstrap, "topics": [topic]},
        "decode": {"format": "json", "schema": "id INT"},
        "sink": {**sinks[request.param], "max_rejects": 100},
    }
    file.write_text(toml(settings))
    oncely("work", file, "--until", "latest")
    return file


def test_rejects_are_listed_by_reason(file: Path) -> None:
    found = oncely_json("rejects", "list", file)
    assert (found["total"], [one["rejects"] for one in found["reasons"]]) == (5, [3, 1, 1])
    assert found["reasons"][0]["reason"].startswith("id: expected INT, found the text")
    odd = oncely_json("rejects", "list", file, "--reason", "EXPECTED int", "--limit", 1)
    assert (odd["total"], len(odd["rejects"])) == (3, 1)
    topic = found["rejects"][0]["topic"]
    one = oncely_json("rejects", "list", file, "--partition", f"{topic}:1")
    assert [r["value"] for r in one["rejects"]] == ["{", '{"id": "b"}', '{"id": "c"}']
    assert "3 id: expected INT" in " ".join(oncely("rejects", "list", file).stdout.split())

    assert oncely_json("rejects", "list", file, "--since", "2100-01-01")["total"] == 0
    assert oncely_json("rejects", "list", file, "--since", "2020-01-01")["total"] == 5
