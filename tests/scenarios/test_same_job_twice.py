"""A batch whose job runs twice at the same time takes effect once."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from oncely.config import parse
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.pipeline import Pipeline
from oncely.testing.faults import closed_gate, waiting
from oncely.testing.processes import await_that
from tests.scenarios.world import World, assert_exactly_once

Replays = dict[tuple[TopicPartition, OffsetRange], list[bool]]


@dataclass(frozen=True)
class Twice(Pipeline):
    """Every batch is run by two threads, with the same ranges."""

    world: Any = None
    replays: Replays = field(default_factory=lambda: defaultdict(list))

    def batches(self, jobs: Any) -> Any:
        runner = super().batches(jobs)
        plain = runner.run

        def twice(batch_id: int, ranges: Any) -> Any:
            with ThreadPoolExecutor(2) as threads:
                with closed_gate(self.world.url, "rows") as database:
                    both = [threads.submit(plain, batch_id, ranges) for _ in range(2)]
                    await_that(lambda: len(waiting(database)) == 2, "both jobs in their COPY")
                outcomes = [future.result() for future in both]
            for one in (one for job in outcomes for one in job):
                self.replays[one.partition, one.range].append(one.replayed)
            return outcomes[0]

        runner.run = twice
        return runner


def test_the_same_job_twice(make_world: Any, runtime: Any) -> None:
    world: World = make_world(4)
    world.make_table()
    world.publish(20_000)
    settings = parse(world.settings(spark={"max_records_per_batch": 4_000}))
    pipeline = Twice(settings, world=world)
    pipeline.run("latest", spark=runtime)
    assert_exactly_once(world)
    assert sum(range_.end - range_.start for _, range_ in pipeline.replays) == 20_000
    for of_both in pipeline.replays.values():
        assert sorted(of_both) == [False, True], "one has written, the other found it done"
