"""A manifest topic belongs to one pipeline and root."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oncely.cli.verbs import app
from oncely.core.claim import Takeover
from oncely.errors import ConfigError, OlderFormat, TableMismatch
from oncely.kafka import topics
from oncely.kinds.data_file import encode
from oncely.kinds.files import manifest
from oncely.kinds.files import topics as owner
from oncely.kinds.files.compact import compact
from oncely.kinds.files.maintenance import vacuum
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.records import ManifestOwner, owner_key
from oncely.kinds.files.sink import FilesSink
from oncely.kinds.files.table import rows
from oncely.kinds.files.verify import verify
from oncely.stores.objects.store import Store
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce
from tests.filestools import IDS, START, FilesPlace, make_place, open_sink, publish_all, stage, what
from tests.laketools import Lake, events, lake
from tests.sinktools import SOURCE


@pytest.fixture
def place(broker: Broker, tmp_path: Path) -> FilesPlace:
    return make_place(broker, tmp_path / "a")


@pytest.fixture
def copied(broker: Broker, tmp_path: Path, place: FilesPlace) -> FilesSink:
    """The pipeline with another name and root, and the same manifest."""
    other = make_place(broker, tmp_path / "b").sink()
    return replace(other, topics=place.sink().topics)


def publish(sink: FilesSink) -> None:
    fence = open_sink(sink).fence
    sink.begin_batch()
    publish_all(sink, what(stage(sink, fence)), fence)


def contents(sink: FilesSink) -> Contents:
    return sink.manifest.settled()


def refused(sink: FilesSink, said: str) -> None:
    """By ``plan`` and before a run (check), by a run itself (open); nothing is written."""
    for call in (sink.check, sink.prepare, lambda: open_sink(sink)):
        with pytest.raises(ConfigError, match=said):
            call()
    assert owner.owner_of(sink.store) is None
    ledger = sink.pipeline_topics.ledger_topic
    assert topics.missing(sink.cluster.admin, [ledger]) == [ledger]


def test_a_second_root_on_a_manifest_is_refused(place: FilesPlace, copied: FilesSink) -> None:
    ours = place.sink()
    publish(ours)
    assert contents(ours).owner == ManifestOwner(place.name, place.root.as_uri())
    refused(copied, rf"sink\.manifest_topic: .* belongs to pipeline '{place.name}'")
    publish(place.sink())  # a restart is no second root
    assert place.ids() == IDS
    assert len(contents(ours).owners) == 1


def test_of_two_first_runs_at_the_same_moment_one_owns_the_manifest(
    place: FilesPlace, copied: FilesSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    write = manifest.ManifestClaim._write

    def together(claim: manifest.ManifestClaim, owners: Any) -> None:
        both.wait(180)  # both have seen a topic without an owner
        write(claim, owners)

    monkeypatch.setattr(manifest.ManifestClaim, "_write", together)
    came: dict[str, str] = {}

    def start(sink: FilesSink) -> None:
        try:
            open_sink(sink)
            came[sink.pipeline_topics.pipeline] = "opened"
        except ConfigError as error:
            came[sink.pipeline_topics.pipeline] = error.key

    sinks = (place.sink(), copied)
    threads = [threading.Thread(target=start, args=(sink,)) for sink in sinks]
    for one in threads:
        one.start()
    for one in threads:
        one.join(180)
    assert sorted(came.values()) == ["opened", "sink.manifest_topic"]
    (owns,) = contents(sinks[0]).owners
    assert came[owns.pipeline] == "opened"


def test_a_claim_that_came_second_and_died_is_no_owner(
    broker: Broker, place: FilesPlace, copied: FilesSink
) -> None:
    ours = place.sink()
    open_sink(ours)
    left = ManifestOwner(copied.pipeline_topics.pipeline, copied.store.url)
    produce(broker, ours.topics.manifest, [(0, owner_key(left.pipeline), encode(left))])
    refused(copied, "belongs to pipeline")
    publish(place.sink())
    assert place.ids() == IDS


def test_files_that_were_moved_are_found_again_after_a_reset(
    broker: Broker, place: FilesPlace
) -> None:
    ours = place.sink()
    publish(ours)
    there = place.root.with_name("moved")
    place.root.rename(there)
    moved = replace(place, root=there)
    with pytest.raises(ConfigError, match=r"sink\.url: .*names files below") as no:
        moved.sink().check()
    assert "offsets reset" in no.value.way_out
    moved.sink().open(Takeover(SOURCE, lambda: START, START, reset=dict))
    moved.sink().check()
    open_sink(moved.sink())
    assert contents(ours).owner == ManifestOwner(place.name, there.as_uri())
    assert verify(moved.table()).problems == ()
    place.root.mkdir()
    with pytest.raises(TableMismatch):
        open_sink(place.sink())


# -- topics without an owner ---------------------------------------------------------------


@pytest.fixture
def own(broker: Broker, tmp_path: Path) -> Lake:
    return lake(broker, tmp_path / "own", max_staging_age=600.0)


def test_a_manifest_without_an_owner_is_refused(
    own: Lake, broker: Broker, place: FilesPlace
) -> None:
    """As versions before the first release wrote it."""
    own.batch_of(events("ann", 0, 2))
    produce(broker, own.topics.manifest, [(0, owner_key(own.topics.name), None)])
    sink = place.sink()
    sink = replace(
        sink, topics=replace(sink.topics, manifest=own.topics.manifest, schema=own.topics.schema)
    )
    before = messages(broker.bootstrap, own.topics.manifest)
    table = own.table
    for call in (
        sink.check, sink.prepare, lambda: open_sink(sink), table.look, lambda: rows(table),
        lambda: verify(table), lambda: compact(table), lambda: vacuum(table),
    ):  # fmt: skip
        with pytest.raises(OlderFormat, match=r"has no owner, .* before 0\.1\.0"):
            call()
    assert len(messages(broker.bootstrap, own.topics.manifest)) == len(before)


def test_a_root_has_a_notice(place: FilesPlace) -> None:
    publish(place.sink())
    notice = place.root / owner.NOTICE
    text = notice.read_text()
    assert place.name in text
    assert f"{place.name}.manifest" in text
    verbs = re.findall(r"oncely files \w+", text)
    assert verbs
    for verb in verbs:
        assert CliRunner().invoke(app, [*verb.split()[1:], "--help"]).exit_code == 0, verb
    os.utime(notice, (0, 0))
    open_sink(place.sink())
    assert notice.stat().st_mtime == 0, "it is written once"

    notice.unlink()
    open_sink(place.sink())
    assert notice.read_text() == text


def test_a_notice_of_another_run_at_the_same_moment_is_no_error(
    own: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "exists", lambda *_: False)
    owner.claim(own.table.store, owner.Owner(own.topics.name, own.topics.manifest, own.topic_id))
    assert (own.root / owner.NOTICE).read_text()


def test_the_notice_belongs_to_the_root(own: Lake) -> None:
    for path in (owner.NOTICE, owner.PATH):
        own.age(path, 1_000_000)
    found = vacuum(own.table)
    assert (found.orphans, found.foreign, found.young) == ((), 0, 0)
    assert (own.root / owner.NOTICE).exists()
    assert verify(own.table).unnamed == 0
