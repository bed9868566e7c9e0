"""`oncely rejects list`: grouped by reason, and filtered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oncely.testing.servers.kafka import Broker
from tests.scenarios.commands import oncely, oncely_json, run
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


HOSTILE = "\x1b[2J\x9b31m\u202e\r\u2028\n\nFORGED"
COMMANDS = [
    "plan FILE --sample 10", "work FILE --until latest --events EVENTS", "status FILE",
    "audit FILE", "audit FILE --json", "rejects list FILE", "rejects list FILE --json",
    "rejects discard FILE", "rejects replay FILE", "repair FILE", "offsets show FILE",
    "verify EVENTS FILE", "init --brokers BROKERS --topic TOPIC -o -", "top FILE --once",
    "local consume TOPIC --brokers BROKERS", "work STRICT --until latest",
    "run FILES --until latest", "files read FILES", "files read FILES --json", "files list FILES",
    "status FILE --json", "work STRICT --until latest --debug", "run TRANSFORMED --until latest",
]  # fmt: skip


def fails(rows: Any) -> Any:
    """A transform whose exception says what a record says."""
    if rows.num_rows:
        raise ValueError(rows.column("id")[0].as_py())
    return rows


def test_text_of_records_is_only_text_in_the_output_of_every_command(
    broker: Broker, make_topic: Any, tmp_path: Path
) -> None:
    """Control characters, marks of direction and line breaks."""
    values = [{"id": HOSTILE}, {HOSTILE: HOSTILE, "id": "b"}, {"id": f"{HOSTILE},\n[sink]"}]
    values += [HOSTILE]  # type: ignore[list-item]
    texts = [json.dumps(one, ensure_ascii=False) for one in values]
    topic = make_topic(records=[(0, HOSTILE, one) for one in texts])
    words = {"BROKERS": broker.bootstrap, "TOPIC": topic, "EVENTS": f"{tmp_path}/events"}
    sql = {"kind": "sql", "url": f"sqlite:///{tmp_path}/rows.db"}
    lake = {"kind": "files", "url": f"file://{tmp_path}/lake", "manifest_topic": f"{topic}.m",
            "partition_by": ["id"], "ledger_topic": f"{topic}.f"}  # fmt: skip
    for name, kind, sink in [
        ("FILE", "STRING", {**sql, "table": "rows", "max_rejects": 100, "keep_source": True}),
        ("STRICT", "INT", {**sql, "table": "strict", "max_rejects": 0}),
        ("FILES", "STRING", {**lake, "max_rejects": 100}),
        ("TRANSFORMED", "STRING", {**sql, "table": "transformed", "max_rejects": 0}),
    ]:
        words[name] = f"{tmp_path}/{name}.toml"
        Path(words[name]).write_text(toml({
            "name": f"{topic}-{name}", "source": {"brokers": broker.bootstrap, "topics": [topic]},
            "decode": {"format": "json", "schema": f"id {kind}"}, "sink": sink,
            "runtime": "processes",
            **({"transform": {"python": f"{__name__}:fails"}} if name == "TRANSFORMED" else {}),
        }))  # fmt: skip
    told = set()
    for line in COMMANDS:
        done = run(*(words.get(word, word) for word in line.split()))
        lines = (done.stdout + done.stderr).split("\n")
        print(line, done.returncode, *lines, sep="\n")
        assert [one for one in lines if not one.isprintable() or one[:6] == "FORGED"] == [], line
        if "FORGED" in done.stdout + done.stderr:
            told.add(line.split()[0])
    assert told >= {"plan", "rejects", "init", "local", "work", "files", "run"}
