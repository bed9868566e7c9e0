"""A batch whose job runs twice at the same time takes effect once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from oncely.config import parse
from oncely.pipeline import Pipeline
from tests.scenarios.world import World, assert_exactly_once


@dataclass(frozen=True)
class Twice(Pipeline):
    """Every batch is run by two threads; Spark gives both the same ranges."""

    def batches(self, spark: Any = None) -> Any:
        runner = super().batches(spark)
        plain = runner.run

        def twice(frame: Any, batch_id: int, ranges: Any) -> Any:
            with ThreadPoolExecutor(2) as threads:
                both = [threads.submit(plain, frame, batch_id, ranges) for _ in range(2)]
                return next(future.result() for future in both)

        runner.run = twice
        return runner


def test_the_same_job_twice(make_world: Any, spark: Any) -> None:
    world: World = make_world(4)
    world.publish(20_000)
    settings = parse(world.settings(spark={"max_records_per_batch": 4_000}))
    Twice(settings).run("latest", spark=spark)
    assert_exactly_once(world)
