"""What tests of the files sink's readers share: topics, and a publisher of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from confluent_kafka import Producer

from oncely.kafka.client import KafkaAdmin
from oncely.kinds.data_file import SourceRange, encode
from oncely.kinds.files.manifest import Manifest
from oncely.kinds.files.records import (
    ManifestFile,
    ManifestOwner,
    ScopeSchema,
    owner_key,
    path_key,
    schema_key,
)
from oncely.kinds.files.topics import TopicIds, require_topics
from oncely.stores.topic.cluster import PipelineTopics
from oncely.testing.servers.kafka import Broker


@dataclass
class Topics:
    """The topics of one test."""

    bootstrap: str
    name: str

    @property
    def manifest(self) -> str:
        return f"manifest-{self.name}"

    @property
    def schema(self) -> str:
        return f"schema-{self.name}"

    @property
    def pipeline_topics(self) -> PipelineTopics:
        return PipelineTopics(
            self.bootstrap, self.name, self.name, f"ledger-{self.name}", timeout=15.0
        )

    def reader(self) -> Manifest:
        return Manifest(self.pipeline_topics, self.manifest, self.schema)

    def make(self, root: str = "file:///lake", *, create: bool = True) -> TopicIds:
        """Create both topics; the first message of the manifest is its owner."""
        admin = KafkaAdmin(self.bootstrap, {}, 10.0)
        ids = require_topics(admin, self.manifest, self.schema, create=create)
        if create:
            producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0})
            owner = ManifestOwner(self.name, root)
            producer.produce(self.manifest, encode(owner), owner_key(self.name), partition=0)
            assert not producer.flush(120)
        return ids

    def publish(
        self,
        files: Iterable[ManifestFile] = (),
        schemas: Iterable[ScopeSchema] = (),
        removed: Iterable[str] = (),
    ) -> None:
        """In one transaction."""
        self._producer.begin_transaction()
        self.send(self._producer, files, schemas, removed)
        self._producer.commit_transaction(120)

    @cached_property
    def _producer(self) -> Producer:
        """One for all: a new instance may take half a second to be initialised."""
        return self._new_producer()

    def _new_producer(self) -> Producer:
        config = {"transactional.id": uuid.uuid4().hex, "linger.ms": 5, "log_level": 0}
        producer = Producer({"bootstrap.servers": self.bootstrap, **config})
        producer.init_transactions(120)
        return producer

    def send(
        self,
        producer: Producer,
        files: Iterable[ManifestFile] = (),
        schemas: Iterable[ScopeSchema] = (),
        removed: Iterable[str] = (),
    ) -> None:
        for one in schemas:
            producer.produce(self.schema, encode(one), schema_key(one.scope), partition=0)
        for file in files:
            while True:
                try:
                    producer.produce(self.manifest, encode(file), path_key(file.path), partition=0)
                    break
                except BufferError:
                    producer.poll(0.1)
        for path in removed:
            producer.produce(self.manifest, None, path_key(path), partition=0)
        assert not producer.flush(120)

    @contextmanager
    def transaction(self) -> Any:
        """A producer of its own inside a transaction; whoever leaves without a commit aborts."""
        producer = self._new_producer()
        producer.begin_transaction()
        try:
            yield producer
        finally:
            producer.close()


def topics(broker: Broker) -> Topics:
    """Names that nobody else uses; the topics are not there yet."""
    return Topics(broker.bootstrap, uuid.uuid4().hex[:12])


def a_file(path: str, **more: Any) -> ManifestFile:
    """An entry; no file needs to stand behind it."""
    known: dict[str, Any] = {
        "path": path,
        "format": "avro",
        "rows": 1,
        "bytes": 1,
        "sha256": "0" * 64,
        "partition": {},
        "event_time": None,
        "ranges": [SourceRange("events", 0, 0, 1)],
        "scope": (),
        "schema": "s1",
        "pipeline": "p",
        "epoch": 1,
        "batch": 1,
    }
    return ManifestFile(**{**known, **more})


def a_schema(id: str = "s1", scope: tuple[str | None, ...] = ()) -> ScopeSchema:
    """A published schema whose text nobody reads."""
    return ScopeSchema(id, scope, '{"type":"record","name":"Record","fields":[]}')
