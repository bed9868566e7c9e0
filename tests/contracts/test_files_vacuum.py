"""Vacuum: orphans go, and nothing else; what would make it dangerous is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from oncely.errors import ConfigError, SourceMismatch
from oncely.kinds.files import sink
from oncely.kinds.files import topics as owner
from oncely.kinds.files.maintenance import SLACK, vacuum
from oncely.kinds.files.sink import LeaseLimits, StagingLeases
from oncely.kinds.partitions import FileNames
from oncely.stores.objects.store import Store
from oncely.testing.servers.kafka import Broker
from tests.laketools import Lake, events, lake
from tests.s3tools import S3Server

STAGING = 600.0
DONE_FOR = STAGING + 60 + SLACK.total_seconds()  # with the transaction timeout


@pytest.fixture
def own(broker: Broker, tmp_path: Path) -> Lake:
    return lake(broker, tmp_path, max_staging_age=STAGING)


def test_orphans_go_and_nothing_else(own: Lake) -> None:
    live, other = own.batch_of(events("ann", 0, 3), events("bob", 3, 1))
    orphan, young = own.file(events("ann", 9, 1)), own.file(events("ann", 10, 1))
    for path in (live.path, orphan.path):
        own.age(path, DONE_FOR + 5)
    own.age(young.path, DONE_FOR - 5)
    (own.root / "README.md").write_text("somebody's")
    own.age("README.md", DONE_FOR + 5)
    probe = ".oncely-probe-0123456789abcdef0123456789abcdef"
    (own.root / probe).write_text("probe")
    own.age(probe, DONE_FOR + 5)

    would = vacuum(own.table, dry_run=True)
    assert {one.path for one in would.orphans} == {orphan.path, probe}
    assert (would.as_json()["removed"], would.as_json()["uploads"]) == (0, 0)
    assert own.paths() >= {orphan.path, probe}

    done = vacuum(own.table)
    assert (len(done.orphans), done.young, done.foreign, done.live) == (2, 1, 1, 2)
    assert done.bytes == orphan.bytes + 5
    assert own.paths() == {live.path, other.path, young.path, "README.md"}
    assert not vacuum(own.table).orphans


def test_a_file_in_an_open_transaction_is_kept_however_old(
    own: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older than publishers allow; but what was in the topic before is waited for."""
    listed, list_ = threading.Event(), Store.list

    def and_tell(store: Store):  # type: ignore[no-untyped-def]
        yield from list_(store)
        listed.set()

    monkeypatch.setattr(Store, "list", and_tell)
    own.batch_of(events("ann", 0, 1))
    slow = own.file(events("ann", 1, 1))
    own.age(slow.path, DONE_FOR + 100)
    with own.topics.transaction() as producer:
        own.topics.send(producer, [slow])
        done = threading.Event()
        threading.Thread(target=lambda: (vacuum(own.table), done.set())).start()
        assert listed.wait(180)
        assert not done.wait(2)
        producer.commit_transaction(120)
        assert done.wait(180)
    assert slow.path in own.paths()


def test_replaced_files_are_kept_for_readers(own: Lake) -> None:
    (old,) = own.batch_of(events("ann", 0, 1))
    (gone,) = own.batch_of(events("ann", 1, 1))
    own.age(old.path, DONE_FOR + 100)
    own.age(gone.path, DONE_FOR + 100)
    merged = own.file(events("ann", 0, 2), start=0)
    own.publish([msgspec.structs.replace(merged, replaces=[old.path])])
    own.topics.publish(removed=[old.path, gone.path])
    kept = vacuum(own.table)
    assert (kept.for_readers, len(kept.orphans)) == (2, 0)
    # The same for readers that are granted no time: the removal is older than this allows.
    hasty = own.with_(max_staging_age=-SLACK.total_seconds() - 1)
    hasty.table = replace(
        hasty.table, pipeline_topics=replace(own.table.pipeline_topics, transaction_timeout=0)
    )
    assert {one.path for one in vacuum(hasty.table).orphans} == {old.path, gone.path}
    assert own.paths() == {merged.path}


def lease(own: Lake, age: float, timeout: float, old: float) -> str:
    """What a process writes that lives by these values, some seconds ago."""
    before = {one.path for one in own.table.store.list()}
    StagingLeases(own.table.store, LeaseLimits(age, timeout)).hold()
    (path,) = {one.path for one in own.table.store.list()} - before
    own.age(path, old)
    return path


def test_what_others_may_still_name_by_larger_values_is_kept(own: Lake) -> None:
    """The pipeline file says less than a process lives by: the larger counts, for twice as long."""
    own.batch_of(events("ann", 0, 1))
    orphan = own.file(events("ann", 1, 1))
    own.age(orphan.path, DONE_FOR + 5)
    for kept in (lease(own, STAGING + 50, 0, 0), lease(own, 0, 60 + 50, 0)):
        assert vacuum(own.table).young == 1
        (own.root / kept).unlink()
    margin = 5 + SLACK.total_seconds()
    kept = lease(own, STAGING + 50, 60, 2 * (STAGING + 50) + margin)
    assert vacuum(own.table).young == 1
    own.age(kept, 10 + 60)
    left_over = {orphan.path, kept}
    assert {one.path for one in vacuum(own.table, dry_run=True).orphans} == left_over
    assert {one.path for one in vacuum(own.table).orphans} == left_over
    assert not (own.root / kept).exists()


def test_replaced_files_are_kept_for_readers_by_the_larger_value(own: Lake) -> None:
    (old,) = own.batch_of(events("ann", 0, 1))
    own.topics.publish(removed=[old.path])
    own.age(old.path, DONE_FOR + 100)
    lease(own, STAGING, 60, 0)
    hasty = own.with_(max_staging_age=-SLACK.total_seconds() - 1)
    assert vacuum(hasty.table).for_readers == 1


def test_replaced_files_are_kept_for_readers_from_the_end_of_the_transaction_on(own: Lake) -> None:
    """The broker's time is that of the message; readers find the old file until the commit."""
    (old,) = own.batch_of(events("ann", 0, 1))
    own.age(old.path, DONE_FOR + 100)
    own.topics.publish(removed=[old.path])
    hasty = own.with_(max_staging_age=-SLACK.total_seconds() - 1)
    assert hasty.table.pipeline_topics.transaction_timeout > 30
    kept = vacuum(hasty.table)
    assert (kept.for_readers, kept.orphans) == (1, ())


def test_a_process_has_a_valid_lease_whenever_it_begins_a_batch(
    own: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr(sink, "clock", lambda: passed[0])
    process = StagingLeases(own.table.store, LeaseLimits(100.0, 10.0))
    for at, count in ((0, 1), (100, 1), (100.5, 2), (200, 2), (201, 3)):
        passed[0] = at
        process.hold()
        found = sink.valid_leases(own.table.store.list(), own.table.store.now())
        assert list(found.values()) == [LeaseLimits(100.0, 10.0)] * count, at


def test_another_manifest_by_the_same_name(broker: Broker, own: Lake) -> None:
    (live,) = own.batch_of(events("ann", 0, 1))
    own.age(live.path, DONE_FOR + 5)
    broker.delete_topic(own.topics.manifest)
    own.topics.make()
    with pytest.raises(SourceMismatch, match="had id"):
        vacuum(own.table)
    assert own.paths() == {live.path}


def test_a_manifest_that_is_made_again_while_it_is_read(
    broker: Broker, own: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed before, recreated in between: the second look at the id sees it."""
    (live,) = own.batch_of(events("ann", 0, 1))
    own.age(live.path, DONE_FOR + 5)
    listed = Store.list

    def made_again(store: Store):  # type: ignore[no-untyped-def]
        yield from listed(store)
        broker.delete_topic(own.topics.manifest)
        own.topics.make()

    monkeypatch.setattr(Store, "list", made_again)
    with pytest.raises(SourceMismatch):
        vacuum(own.table)
    assert own.paths() == {live.path}


def test_a_root_that_belongs_to_another_pipeline(broker: Broker, own: Lake, tmp_path: Path) -> None:
    (live,) = own.batch_of(events("ann", 0, 1))
    own.age(live.path, DONE_FOR + 5)
    other = lake(broker, tmp_path.with_name("elsewhere"))
    other.table = replace(other.table, store=own.table.store)
    other.topics.publish([])
    with pytest.raises(ConfigError, match=f"belongs to pipeline '{own.topics.name}'"):
        vacuum(other.table)
    with pytest.raises(ConfigError, match="belongs to pipeline"):
        owner.claim(own.table.store, owner.Owner("other", "m", other.topic_id))
    (own.root / owner.PATH).unlink()
    with pytest.raises(ConfigError, match="not known whose files"):
        vacuum(own.table)
    assert own.paths() == {live.path}


def test_a_root_below_ours_is_not_ours(broker: Broker, own: Lake, tmp_path: Path) -> None:
    own.batch_of(events("ann", 0, 1))
    below = lake(broker, tmp_path / "more" / "events")
    (live,) = below.batch_of(events("ann", 0, 1))
    below.age(live.path, DONE_FOR + 5)
    assert vacuum(own.table).foreign == 3  # with the two marks of its root
    assert below.paths() == {live.path}


def test_a_root_that_is_a_whole_bucket(own: Lake, s3_server: S3Server) -> None:
    """Others have files and a table of Oncely's in it; an upload that nobody completed is told."""
    bucket, options = s3_server.bucket(), s3_server.options()
    store = Store(f"s3://{bucket}", options)
    for root in (store, Store(f"s3://{bucket}/more/events", options)):
        owner.claim(root, owner.Owner(own.topics.name, own.topics.manifest, own.topic_id))
    name = FileNames(1, 1, "t0").name(("events", 0, 7), "avro")
    others = ["backup/db.dump", f"{name}.tmp", f"more/events/user=ann/{name}"]
    for path in (f"user=ann/{name}", *others):
        store.write(path, b"")
    hasty = replace(own.table.pipeline_topics, transaction_timeout=0)
    ours = replace(own.table, store=store, pipeline_topics=hasty, max_staging_age=-3600.0)
    would = vacuum(ours, dry_run=True)
    assert [one.path for one in would.orphans] == [f"user=ann/{name}"]
    done = vacuum(ours)
    assert [one.path for one in done.orphans] == [f"user=ann/{name}"]
    assert done.as_json()["uploads"] is None, "they are not looked for"
    assert {one.path for one in store.list()} >= set(others)


def test_a_pipeline_that_the_ledger_does_not_know(own: Lake) -> None:
    own.batch_of(events("ann", 0, 1))
    nobody = own.with_(pipeline_topics=replace(own.table.pipeline_topics, pipeline="nobody"))
    with pytest.raises(ConfigError, match=r"sink\.ledger_topic: .*'nobody'"):
        vacuum(nobody.table)
