"""docs/MANIFEST.md is true: its messages are read, and a plain consumer sees what we see."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from oncely.decode.avro_schema import schema_id
from oncely.kinds.data_file import encode
from oncely.kinds.files.compact import compact
from oncely.kinds.files.records import (
    ManifestFile,
    ManifestOwner,
    ScopeSchema,
    owner_key,
    read_manifest,
    read_owner,
    read_schema,
    schema_key,
)
from oncely.kinds.partitions import is_file
from oncely.testing.servers.kafka import Broker
from tests.conftest import repository
from tests.laketools import Lake, events, lake
from tests.manifesttools import a_file


@pytest.fixture
def own(broker: Broker, tmp_path: Path) -> Lake:
    return lake(broker, tmp_path)


def example() -> Any:
    path = repository() / "examples" / "follow_manifest.py"
    spec = importlib.util.spec_from_file_location("follow_manifest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plain_consumer_sees_the_same_files(own: Lake) -> None:
    for i in range(3):
        own.batch_of(events("ann", i * 2, 2), events("bob", 50 + i, 1))
    settled(own, 6)
    compact(own.table)
    own.batch_of(events("ann", 80, 1))
    ours = settled(own, 3)
    theirs = example().files(own.topics.bootstrap, own.topics.manifest)
    assert theirs == {path: json.loads(encode(file)) for path, file in ours.items()}


def settled(own: Lake, number: int) -> dict[str, ManifestFile]:
    """The files, when there are that many: the marker of a transaction follows its answer."""
    with own.topics.reader() as reader:
        while len(found := reader.settled().files) != number:
            pass
    return dict(found)


def test_it_sees_no_row_twice_where_tombstones_are_hidden(own: Lake) -> None:
    own.topics.publish([a_file("a"), a_file("b")])
    with own.topics.transaction() as first, own.topics.transaction() as second:
        own.topics.send(first, [a_file("c", replaces=["a", "b"])])
        own.topics.send(second, [a_file("d")])
        own.topics.send(first, removed=["a", "b"])
        first.commit_transaction(20)
        while "c" not in (found := example().files(own.topics.bootstrap, own.topics.manifest)):
            pass  # the marker follows the commit's answer
        assert set(found) == {"c"}


def test_the_documented_messages_are_ours() -> None:
    text = (repository() / "docs" / "MANIFEST.md").read_text()
    file, schema, owner = re.findall(r"```json\n(.*?)```", text, re.S)
    path, found = read_manifest(json.loads(file)["path"].encode(), file.encode())
    assert found is not None
    assert json.loads(encode(found)) == json.loads(file)
    assert is_file(path)
    known = read_schema(schema_key(("ann",)), schema.encode())
    assert known is not None
    assert json.loads(encode(known)) == json.loads(schema)
    assert len(known.id) == len(schema_id("")) == 16
    owned = read_owner(owner_key("events"), owner.encode())
    assert owned is not None
    assert owned[1] is not None
    assert json.loads(encode(owned[1])) == json.loads(owner)


@pytest.mark.parametrize(
    ("words", "title"),
    [(ManifestFile, "A file"), (ScopeSchema, "A schema"), (ManifestOwner, "The owner")],
)
def test_every_field_is_documented(words: Any, title: str) -> None:
    text = (repository() / "docs" / "MANIFEST.md").read_text()
    (part,) = re.findall(rf"## {title}\n(.*?)\n## ", text, re.S)
    for name in words.__struct_fields__:
        assert f"`{name}`" in part or f'"{name}"' in part, name
