"""A command reads on from what an earlier one has kept, unless something speaks against it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer

from oncely.kafka.client import make
from oncely.kinds.files import manifest as module
from oncely.kinds.files.manifest import Contents, Manifest
from oncely.testing.servers.kafka import Broker
from tests.manifesttools import Topics, a_file, a_schema, topics

assigned: list[tuple[str, int]] = []


@pytest.fixture
def own(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Topics:
    """Three files, of which one is replaced."""
    monkeypatch.setattr(module, "_WORTH_KEEPING", 1)
    made = topics(broker)
    made.make()
    made.publish([a_file("a"), a_file("b")], [a_schema()])
    made.publish([a_file("c", replaces=["a"])], removed=["a"])
    return made


def noting(kind: Any, *args: Any, **own: Any) -> Any:
    """A client that notes from where it reads."""
    if kind is not Consumer:
        return make(kind, *args, **own)

    class Noting(Consumer):  # type: ignore[misc]
        def assign(self, partitions: Any) -> None:
            assigned.extend((one.topic, one.offset) for one in partitions)
            super().assign(partitions)

    return make(Noting, *args, **own)


def look(own: Topics, folder: Path) -> Contents:
    """As a command does."""
    with Manifest(replace(own.pipeline_topics, connect=noting), own.manifest, own.schema) as reader:
        reader.settled()  # markers follow the answers to commits
    assigned.clear()
    with Manifest(replace(own.pipeline_topics, connect=noting), own.manifest, own.schema) as reader:
        return reader.look_cached(folder)


def whole(own: Topics) -> Contents:
    with own.reader() as reader:
        return reader.settled()


def first_offsets(own: Topics) -> dict[str, int]:
    return {topic: min(at for t, at in assigned if t == topic) for topic, _ in assigned}


def test_the_next_command_reads_what_is_new(own: Topics, tmp_path: Path) -> None:
    assert look(own, tmp_path / "new") == whole(own)
    assert first_offsets(own) == {own.manifest: 0, own.schema: 0}
    own.publish([a_file("d", schema="s2")], [a_schema("s2", ("x",))], removed=["b"])
    found = look(own, tmp_path / "new")
    assert found == whole(own)
    assert list(found.files) == ["c", "d"]
    assert first_offsets(own)[own.manifest] > 2
    again = look(own, tmp_path / "new")
    assert again == found
    assert set(found.removed) == {"a", "b"}
    (kept,) = (tmp_path / "new").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert kept.parent.stat().st_mode & 0o077 == 0


def changed(kept: Path, change: Callable[[module.TopicsSnapshot], module.TopicsSnapshot]) -> None:
    found = msgspec.msgpack.decode(kept.read_bytes()[32:], type=module.TopicsSnapshot)
    module.save(kept.parent, change(found))


def false_file(found: module.TopicsSnapshot) -> dict[str, bytes]:
    """Contents that the topics never had: if they are shown, the snapshot was believed."""
    return {**found.files, "false": next(iter(found.files.values()))}


def spoil(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:-3])


def of_another_log(kept: Path) -> None:
    """The last message is another one now, as after an unclean leader election."""

    def change(found: module.TopicsSnapshot) -> module.TopicsSnapshot:
        assert found.manifest.last is not None
        mark = (found.manifest.last[0], b"another digest")
        last = msgspec.structs.replace(found.manifest, last=mark)
        return msgspec.structs.replace(found, manifest=last, files=false_file(found))

    changed(kept, change)


def of_a_longer_log(kept: Path) -> None:
    def change(found: module.TopicsSnapshot) -> module.TopicsSnapshot:
        assert found.manifest.last is not None
        last = msgspec.structs.replace(found.manifest, last=(1_000, found.manifest.last[1]))
        return msgspec.structs.replace(found, manifest=last, files=false_file(found))

    changed(kept, change)


def too_old(kept: Path) -> None:
    changed(
        kept,
        lambda found: msgspec.structs.replace(
            found, taken=time.time() - 4 * 86_400, files=false_file(found)
        ),
    )


def from_the_future(kept: Path) -> None:
    changed(
        kept,
        lambda found: msgspec.structs.replace(
            found, taken=time.time() + 3_600, files=false_file(found)
        ),
    )


def of_another_version(kept: Path) -> None:
    changed(
        kept,
        lambda found: msgspec.structs.replace(
            found, fields=[*found.fields, "more"], files=false_file(found)
        ),
    )


def of_another_user(kept: Path) -> None:
    changed(kept, lambda found: msgspec.structs.replace(found, files=false_file(found)))
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(kept, 12_345, -1)


def lost(kept: Path) -> None:
    kept.unlink()


@pytest.mark.parametrize(
    "harm",
    [
        spoil,
        of_another_log,
        of_a_longer_log,
        too_old,
        from_the_future,
        of_another_version,
        of_another_user,
        lost,
    ],
)
def test_a_snapshot_that_may_be_wrong_is_not_used(
    own: Topics, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    look(own, tmp_path)
    (kept,) = tmp_path.iterdir()
    harm(kept)
    found = look(own, tmp_path)
    assert found == whole(own)
    assert "false" not in found.files
    assert first_offsets(own)[own.manifest] == 0


def test_a_topic_that_was_made_again_is_read_anew(
    own: Topics, broker: Broker, tmp_path: Path
) -> None:
    look(own, tmp_path)
    for topic in (own.manifest, own.schema):
        broker.delete_topic(topic)
    own.make()
    own.publish([a_file("e")], [a_schema()])
    own.publish([a_file("f")])
    assert list(look(own, tmp_path).files) == ["e", "f"]


def test_a_small_table_keeps_nothing(
    own: Topics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_WORTH_KEEPING", 100)
    look(own, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_error(own: Topics, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert look(own, tmp_path / "file" / "below") == whole(own)
