"""The lake's rules, its independent reader, and the moments at which its pipeline is killed."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import psutil
import pytest
from confluent_kafka import Producer

from demo import lake_reader
from demo.job import ROOT, Job, JobPlan
from demo.lake_moment import Eyes, caught
from demo.lake_reader import Verdict, compare, environment, stored
from demo.lake_rules import folder_of, row_of
from demo.moment import Missed
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker

GOOD = {
    "id": 1,
    "carrier": "UA",
    "flight": 1545,
    "tailnum": None,
    "time_hour": "2013-01-01T10:00:00Z",
    "dep_delay": 2.0,
    "distance": 1400,
}
SCHEMA = {
    "type": "record",
    "name": "Record",
    "fields": [
        {"name": "id", "type": ["null", "long"]},
        {"name": "carrier", "type": ["null", "string"]},
        {"name": "time_hour", "type": ["null", "string"]},
        {"name": "tailnum", "type": ["null", "string"]},
    ],
}
FOLDER = "carrier=UA/date=2013-01-01/hour=10"


def with_(**change: object) -> bytes:
    return json.dumps({**GOOD, **change}).encode()


# -- the rules -----------------------------------------------------------------------------


def test_a_flight_keeps_all_its_members_but_nulls():
    wanted = {name: one for name, one in GOOD.items() if one is not None}
    assert row_of(with_()) == wanted
    assert row_of(with_(note="line\nbreak")) == {**wanted, "note": "line\nbreak"}
    assert folder_of(wanted) == FOLDER


@pytest.mark.parametrize(
    "change", [{"distance": 0.5}, {"flight": 2**31}, {"tailnum": "N1\0"}, {"id": 2**63 - 1}]
)
def test_what_a_fixed_schema_refuses_may_be_a_row_here(change):
    assert row_of(with_(**change)) is not None


@pytest.mark.parametrize(
    "value",
    [
        *(None, b"", b" \r\n", b"[1]", with_()[:-2], b"[" + with_() + b"]"),
        *(with_(flight="1545"), with_(dest=7), with_(id=2**63), with_(time_hour="2013-02-30")),
        *(with_(time_hour="2013-02-30T10:00:00Z"), with_(dep_delay=True)),
        with_().replace(b"2.0", b"NaN"),
        with_().replace(b"UA", b"\xff"),
    ],
)
def test_what_is_no_flight_is_broken(value):
    assert row_of(value) is None


# -- the comparison ------------------------------------------------------------------------


def put(root: Path, name: str, *rows: dict[str, Any], folder: str = FOLDER) -> dict[str, Any]:
    """Write a file; its entry of the manifest."""
    out = io.BytesIO()
    fastavro.writer(out, SCHEMA, rows)
    path = root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out.getvalue())
    digest = hashlib.sha256(out.getvalue()).hexdigest()
    return {"rows": len(rows), "bytes": len(out.getvalue()), "sha256": digest, "replaces": []}


def flight(number: int) -> dict[str, Any]:
    return {"id": number, "carrier": "UA", "time_hour": "2013-01-01T10:00:00Z"}


@pytest.fixture
def lake(tmp_path: Path) -> dict[str, Any]:
    """Three flights in two files, and a broken record that is a dead letter."""
    return {
        "good": {number: flight(number) for number in (1, 2, 3)},
        "broken": {(0, 9): b"{"},
        "manifest": {
            f"{FOLDER}/a.avro": put(tmp_path, "a.avro", flight(1), flight(2)),
            f"{FOLDER}/b.avro": put(tmp_path, "b.avro", flight(3)),
        },
        "letters": [((0, 9), b"{")],
        "root": tmp_path,
    }


def wrong(verdict: Verdict) -> dict[str, int]:
    names = ("lost", "duplicated", "changed", "unexpected", "broken_files")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


def test_what_agrees_has_nothing_wrong(lake):
    verdict = compare(**lake)
    assert (verdict.records, verdict.manifest_rows, verdict.rows, verdict.rejects) == (4, 3, 3, 1)
    assert wrong(verdict) == {}
    assert verdict.files == 2


def test_rows_of_a_named_file_that_is_gone_or_another_one_are_lost(lake):
    (lake["root"] / FOLDER / "b.avro").unlink()
    assert wrong(compare(**lake)) == {"lost": 1, "broken_files": 1}
    put(lake["root"], "b.avro", flight(4))
    assert wrong(compare(**lake)) == {"lost": 1, "broken_files": 1}


def test_a_row_in_two_named_files_is_duplicated_and_in_an_unnamed_one_is_not(lake):
    entry = put(lake["root"], "c.avro", flight(3))
    assert wrong(compare(**lake)) == {}
    lake["manifest"][f"{FOLDER}/c.avro"] = entry
    assert wrong(compare(**lake)) == {"duplicated": 1}


def test_a_row_of_other_values_or_in_another_folder_is_changed(lake):
    lake["good"][3] = {**flight(3), "tailnum": "N14228"}
    assert wrong(compare(**lake)) == {"changed": 1}
    lake["good"][3] = flight(3)
    other = FOLDER.replace("hour=10", "hour=11")
    lake["manifest"].pop(f"{FOLDER}/b.avro")
    lake["manifest"][f"{other}/b.avro"] = put(lake["root"], "b.avro", flight(3), folder=other)
    assert wrong(compare(**lake)) == {"changed": 1}


def test_a_row_of_no_record_is_unexpected(lake):
    lake["good"].pop(3)
    assert wrong(compare(**lake)) == {"unexpected": 1}


def test_dead_letters_are_compared_by_place_and_bytes(lake):
    assert wrong(compare(**{**lake, "letters": []})) == {"lost": 1}
    assert wrong(compare(**{**lake, "letters": lake["letters"] * 2})) == {"duplicated": 1}
    assert wrong(compare(**{**lake, "letters": [((0, 9), b"")]})) == {"changed": 1}
    more = [*lake["letters"], ((1, 1), b"x")]
    assert wrong(compare(**{**lake, "letters": more})) == {"unexpected": 1}


def test_every_file_but_those_about_the_root_is_listed(lake):
    for name in ("owner.json", "staging/age60.000-timeout10.000-0123456789abcdef"):
        about = lake["root"] / "_oncely" / name
        about.parent.mkdir(exist_ok=True)
        about.touch()
    (lake["root"] / "_READ_THE_MANIFEST.txt").touch()
    assert stored(lake["root"]) == lake["manifest"].keys()


# -- on a real broker ----------------------------------------------------------------------


def named(broker: Broker, topic: str, manifest: dict[str, dict[str, Any]], name: str) -> Producer:
    """A producer that has begun to name files."""
    producer = Producer({**broker.client_config(), "transactional.id": name, "log_level": 3})
    producer.init_transactions(120)
    producer.begin_transaction()
    for path, entry in manifest.items():
        producer.produce(topic, json.dumps(entry).encode(), path.encode())
    producer.flush(120)
    return producer


def read(broker: Broker, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "demo.lake_reader", *arguments],
        cwd=ROOT,
        env=environment(broker.bootstrap),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_reader_begins_at_the_start_and_follows_what_is_committed(broker, make_topic, lake):
    source, manifest, schemas, rejects = (make_topic(partitions=1) for _ in range(4))
    producer = Producer(broker.client_config())
    now = round(time.time())
    producer.produce(source, json.dumps(flight(99)).encode(), timestamp=1000 * now - 1)
    for number in (1, 2, 3):
        producer.produce(source, json.dumps(flight(number)).encode(), timestamp=1000 * now)
    producer.produce(source, b"{", timestamp=1000 * now)
    producer.produce(schemas, b"{}", b'["schema","UA"]')
    headers = [("oncely.partition", b"0"), ("oncely.offset", b"4")]
    producer.produce(rejects, b"{", headers=headers)
    assert producer.flush(120) == 0
    named(broker, manifest, lake["manifest"], manifest).commit_transaction(120)
    aborted = put(lake["root"], "c.avro", flight(3))
    named(broker, manifest, {f"{FOLDER}/c.avro": aborted}, manifest).abort_transaction(120)
    topics = source, manifest, schemas, rejects
    found = read(broker, "count", *topics, str(now), str(lake["root"]))
    assert (found["records"], found["rows"], found["rejects"], found["schemas"]) == (4, 3, 1, 1)
    assert (found["lost"], found["duplicated"], found["unexpected"]) == (0, 0, 0)
    assert found["orphans"] == [f"{FOLDER}/c.avro"]
    assert found["newest_orphan"] == (lake["root"] / FOLDER / "c.avro").stat().st_mtime
    assert found["pipeline_code_imported"] is False
    (lake["root"] / FOLDER / "a.avro").unlink()
    assert read(broker, "look", manifest, str(lake["root"]))["missing"] == 1


WRITER = """
import pathlib, sys, time
for day in range(1, 10_000):
    folder = pathlib.Path(sys.argv[1], "carrier=UA", f"date={day}", "hour=10")
    folder.mkdir(parents=True)
    (folder / "x.avro").write_text("")
    time.sleep(0.02)
"""
IDLE = "import time\nwhile True: time.sleep(0.05)"


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(program: str, *arguments: str) -> Job:
        command = [sys.executable, "-c", program, *arguments]
        jobs.append(Job(JobPlan("files", command, {}, tmp_path / "files.log")))
        jobs[-1].start()
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def make_eyes(broker: Broker) -> Iterator[Callable[[str, Path], Eyes]]:
    made: list[Eyes] = []

    def make(topic: str, root: Path) -> Eyes:
        made.append(Eyes(broker.bootstrap, topic, root))
        return made[-1]

    yield make
    for eyes in made:
        eyes.close()


def test_a_job_is_caught_staging_by_files_that_nobody_names(make_topic, make_job, make_eyes, lake):
    job = make_job(WRITER, str(lake["root"]))
    eyes = make_eyes(make_topic(partitions=1), lake["root"])
    with caught(job, eyes, "staging", 20.0) as moment:
        assert job.driver.status() == psutil.STATUS_STOPPED
        assert "carrier=UA/date=1/hour=10/x.avro" in moment.staged
        assert moment.open_messages == 0
    assert job.driver.status() != psutil.STATUS_STOPPED


def test_what_is_named_is_not_staged(broker, make_topic, make_job, make_eyes, lake):
    topic = make_topic(partitions=1)
    named(broker, topic, lake["manifest"], topic).commit_transaction(120)
    eyes = make_eyes(topic, lake["root"])
    assert not eyes.certain("publishing", [])
    assert eyes.certain("staging", []) is None
    assert eyes.rows == 3
    with pytest.raises(Missed), caught(make_job(IDLE), eyes, "staging", 0.5):
        pass


def test_a_job_is_caught_publishing_only_while_the_transaction_is_open(
    broker, make_topic, make_job, make_eyes, lake
):
    topic = make_topic(partitions=1)
    producer = named(broker, topic, lake["manifest"], topic)
    job, eyes = make_job(IDLE), make_eyes(topic, lake["root"])
    eyes.look()
    assert eyes.certain("staging", []) is None, "what is being named is not staging any more"
    with caught(job, eyes, "publishing", 20.0) as moment:
        assert moment.open_messages == 2
        assert moment.staged == lake["manifest"].keys()
    producer.commit_transaction(120)
    await_that(lambda: not eyes.open_messages(), "the end of the transaction")
    assert eyes.certain("publishing", []) is None
    assert lake_reader.read_manifest(broker.bootstrap, topic) == lake["manifest"]
