"""Records that are deleted between the plan of a batch and its fetch: a gap, never a hole."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient

from oncely.config import parse
from oncely.core import events
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import DataLost
from oncely.pipeline import Pipeline
from tests.scenarios.world import World

RECORDS, DELETED = 400, 30


class DeletesOnce:
    """Deletes the first records of partition 0 when the first batch is planned."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.heard: list[events.Event] = []

    def __call__(self, event: events.Event) -> None:
        first = not any(isinstance(one, events.BatchPlanned) for one in self.heard)
        self.heard.append(event)
        if first and isinstance(event, events.BatchPlanned):
            admin = AdminClient({"bootstrap.servers": self.world.brokers})
            at = ck.TopicPartition(self.world.topic, 0, DELETED)
            for done in admin.delete_records([at]).values():
                done.result()


def pipeline_of(world: World, on_gap: str) -> Pipeline:
    settings = world.settings(source={"on_gap": on_gap})
    return Pipeline(parse(settings | {"runtime": "processes", "processes": 2}))


def test_they_are_recorded_as_a_gap_and_the_rest_is_written(make_world: Any) -> None:
    world: World = make_world(4)
    world.publish(RECORDS)
    heard = DeletesOnce(world)
    assert pipeline_of(world, "record").run("latest", listener=heard)
    gaps = [one for one in heard.heard if isinstance(one, events.GapFound)]
    tp = TopicPartition(world.topic, 0)
    assert [(one.partition, one.missing) for one in gaps] == [(tp, OffsetRange(0, DELETED))]
    assert world.count() == RECORDS - DELETED
    kinds = dict(
        world.sql("SELECT kind, sum(range_end - range_start) FROM oncely_ranges GROUP BY kind")
    )
    assert kinds == {"gap": DELETED, "data": RECORDS - DELETED}


def test_they_end_the_run_if_gaps_are_refused(make_world: Any) -> None:
    world: World = make_world(4)
    world.publish(RECORDS)
    with pytest.raises(DataLost):
        pipeline_of(world, "fail").run("latest", listener=DeletesOnce(world))
    partition_0 = "SELECT count(*) FROM rows WHERE kafka_partition = 0"
    assert world.sql(partition_0) == [(0,)]
