"""A streaming DataFrame that somebody already has writes exactly once.

The query keeps its own checkpoint. Killed between our commit and Spark's, it repeats a batch;
another checkpoint under the same name is refused where it can't continue.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from oncely.errors import ConfigError, OncelyError, SourceMismatch, TableMismatch
from oncely.pipeline.streaming import write_stream
from oncely.runtimes.spark.plugin import is_stateful
from oncely.testing.servers.kafka import Broker
from tests.conftest import repository
from tests.scenarios.streamer import frame_of, run, start, stop_in_batch
from tests.scenarios.world import World, produce

RECORDS = 300
FIRST = 1_700_000_000


@dataclass
class Query:
    """One query's order, and how to run it in a child process."""

    world: World
    folder: Path
    stateful: bool
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> dict[str, Any]:
        return {
            "brokers": self.world.brokers,
            "topic": self.world.topic,
            "url": self.world.url,
            "name": self.world.name,
            "table": "counted" if self.stateful else "plain",
            "checkpoint": str(self.folder / "checkpoint"),
            "stateful": self.stateful,
            **self.more,
        }

    def child(self, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end, whatever that is."""
        file = self.folder / "order.json"
        file.write_text(json.dumps(self.order | more))
        return subprocess.run(
            [sys.executable, "-m", "tests.scenarios.streamer", str(file)],
            cwd=repository(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def publish(world: World, first: int, count: int) -> None:
    """One record a second of event time, in two partitions."""
    produce(
        world.brokers,
        world.topic,
        (
            (i % 2, str(i).encode(), json.dumps({"id": i, "at": FIRST + i}).encode())
            for i in range(first, first + count)
        ),
    )


def expected_windows(records: int) -> dict[int, int]:
    """Windows that the watermark (5 s behind the newest record) has closed."""
    windows = Counter((FIRST + i) // 10 * 10 for i in range(records))
    watermark = FIRST + records - 1 - 5
    return {start: n for start, n in windows.items() if start + 10 <= watermark}


def assert_rows(world: World, records: int) -> None:
    rows = world.sql('SELECT "partition", "offset", id FROM plain')
    assert len(rows) == len(set(rows)) == records
    assert {id_ for *_, id_ in rows} == set(range(records))


def assert_windows(world: World, records: int) -> None:
    rows = world.sql("SELECT start, count FROM counted")
    assert sorted(rows) == sorted(expected_windows(records).items())


NOTED = "SET query_id"  # the last statement before the publishing COMMIT


def killed_at_commit(batch: int, *, after: bool) -> dict[str, Any]:
    """Die round the COMMIT of the ``batch``-th publication of the process."""
    return {"call": 1, "after": after, "armed_by": NOTED, "skip": batch}


@pytest.fixture
def query(make_world: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Query:
    return Query(make_world(2), tmp_path, stateful=request.param)


both = pytest.mark.parametrize("query", [False, True], indirect=True, ids=["stateless", "stateful"])


def assert_all(query: Query, records: int) -> None:
    (assert_windows if query.stateful else assert_rows)(query.world, records)


def assert_survives(query: Query, spark: Any, *kills: dict[str, Any]) -> None:
    publish(query.world, 0, RECORDS)
    for kill in kills:
        died = query.child(kill=kill)
        assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    run(query.order, spark)
    assert_all(query, RECORDS)


@pytest.mark.long  # what such a kill leaves behind is in every run: the next test but one
@pytest.mark.parametrize("query", [True], indirect=True, ids=["stateful"])
def test_killed_between_our_commit_and_sparks(query: Query, spark: Any) -> None:
    assert_survives(query, spark, killed_at_commit(1, after=True))


@both
@pytest.mark.long
@pytest.mark.deep  # one such kill: the test above
@pytest.mark.timeout(900)
def test_killed_round_several_commits(query: Query, spark: Any) -> None:
    """The last death falls on the last data batch: nothing but the watermark moves after it."""
    kills = [(0, True), (0, False), (1, True)]
    assert_survives(query, spark, *(killed_at_commit(n, after=after) for n, after in kills))


@both
def test_a_batch_that_spark_repeats_is_written_once(query: Query, spark: Any) -> None:
    """Spark forgets its newest commit; then everything since the last batch that had data.

    Repeating the latter, only the run of the plan moves the watermark, and without it the
    windows that it closes would never be written.
    """
    for part in range(2):
        before = [0, *expected_windows(part * 100)]
        publish(query.world, part * 100, 100)
        run(query.order, spark)
        forget(query, ["commits"], newest(query, "commits"))
        run(query.order, spark)
        assert_all(query, (part + 1) * 100)
        last = newest(query, "offsets")
        if query.stateful:
            assert offsets(query, last) == offsets(query, last - 1), "a batch without data"
            forget(query, ["commits", "offsets"], last)
            query.world.sql("DELETE FROM counted WHERE start > %s", max(before))
            last -= 1
            plan = (query.folder / f"checkpoint/offsets/{last}").read_bytes()
            query.world.sql(
                "UPDATE oncely_pipelines SET query_batch = %s, query_plan = %s",
                *(last, hashlib.sha256(plan).hexdigest()[:32]),
            )
        forget(query, ["commits"], last)
        run(query.order, spark)
        assert_all(query, (part + 1) * 100)


def newest(query: Query, log: str) -> int:
    folder = query.folder / "checkpoint" / log
    return max(int(file.name) for file in folder.iterdir() if file.name.isdigit())


def offsets(query: Query, batch: int) -> str:
    return (query.folder / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()[-1]


def forget(query: Query, logs: list[str], batch: int) -> None:
    for log in logs:
        for name in (str(batch), f".{batch}.crc"):
            (query.folder / "checkpoint" / log / name).unlink(missing_ok=True)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_a_batch_that_spark_plans_again_further_is_not_skipped(query: Query, spark: Any) -> None:
    """The checkpoint has lost its newest batch, which the table has; more records came since."""
    for part in range(2):
        publish(query.world, part * 100, 100)
        run(query.order, spark)
    forget(query, ["commits", "offsets"], 1)
    publish(query.world, 200, 100)
    way_out = json.dumps({query.world.topic: {"0": 100, "1": 100}})
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=r"batch 1 .* planned again") as refused:
            run(query.order | {"max_offsets": 200}, spark)
        assert f"startingOffsets {way_out}" in str(refused.value)
    assert_rows(query.world, 200)
    run(query.order | {"checkpoint": str(query.folder / "new"), "starting": way_out}, spark)
    assert_rows(query.world, 300)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_an_older_checkpoint_repeats_what_the_table_has(query: Query, spark: Any) -> None:
    """Planned again in other parts: whatever ends at or before the ledger's position is there."""
    for part in range(3):
        publish(query.world, part * 100, 100)
        run(query.order, spark)
    for batch in (1, 2):
        forget(query, ["commits", "offsets"], batch)
    run(query.order | {"max_offsets": 200}, spark)
    assert newest(query, "commits") == 1
    assert_rows(query.world, 300)


@pytest.mark.parametrize("query", [True], indirect=True)
def test_a_query_with_state_repeats_only_the_very_batch(query: Query, spark: Any) -> None:
    """Planned again with the same records, another watermark may close other windows."""
    for _ in range(2):
        publish(query.world, 0, 100)  # the second time they are late and move no watermark
        run(query.order, spark)
    assert newest(query, "commits") == 2, "two batches with data, one without between them"
    forget(query, ["commits", "offsets"], 2)
    with pytest.raises(StreamingQueryException, match=r"batch 2 .* planned again"):
        run(query.order, spark)
    for batch in (1, 2):
        forget(query, ["commits", "offsets"], batch)
    with pytest.raises(StreamingQueryException, match=r"batch 1 is older .* 2"):
        run(query.order, spark)
    assert_windows(query.world, 100)


@both
def test_another_checkpoint_is_refused(query: Query, spark: Any) -> None:
    publish(query.world, 0, 100)
    run(query.order, spark)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="does not continue what is in the"):
            run(query.order | {"checkpoint": str(query.folder / "another")}, spark)
        publish(query.world, 100, 100)
    run(query.order, spark)
    assert query.world.sql("SELECT epoch FROM oncely_pipelines") == [(4,)]
    found = query.world.sql(f"SELECT count(*) FROM {query.order['table']}")[0][0]
    assert found == (len(expected_windows(200)) if query.stateful else 300)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_a_query_without_state_goes_on_from_the_very_offsets(query: Query, spark: Any) -> None:
    """Its checkpoint was lost, and the new one begins where the table stands."""
    publish(query.world, 0, 100)
    run(query.order, spark)
    publish(query.world, 100, 100)
    positions = {
        str(partition): position
        for partition, position in query.world.sql(
            'SELECT "partition", "position" FROM oncely_positions'
        )
    }
    starting = json.dumps({query.world.topic: positions})
    run(query.order | {"checkpoint": str(query.folder / "new"), "starting": starting}, spark)
    assert_rows(query.world, 200)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_a_second_query_fences_the_first(query: Query, spark: Any) -> None:
    publish(query.world, 0, 100)
    run(query.order, spark)
    first = start(query.order, spark, {"processingTime": "100 milliseconds"})
    with pytest.raises(ConfigError, match=r"^name: .* runs in this Spark session"):
        run(query.order, spark)
    second = query.order | {"checkpoint": str(query.folder / "second"), "starting": "latest"}
    run(second, spark.newSession())
    publish(query.world, 100, 50)
    with pytest.raises(StreamingQueryException, match="is fenced by epoch"):
        first.awaitTermination(60)
    assert_rows(query.world, 100)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_a_topic_that_was_made_again_is_refused(query: Query, spark: Any, broker: Broker) -> None:
    world = query.world
    publish(world, 0, 100)
    run(query.order, spark)
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, 2)
    publish(world, 0, 200)
    with pytest.raises((StreamingQueryException, SourceMismatch), match="recreated"):
        run(query.order, spark)
    assert_rows(world, 100)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_without_brokers_nobody_is_asked_for_identity(query: Query, spark: Any) -> None:
    publish(query.world, 0, 100)
    run(query.order | {"identity": False}, spark)
    publish(query.world, 100, 100)
    run(query.order | {"identity": False}, spark)
    assert_rows(query.world, 200)
    with pytest.raises(ConfigError, match="begun without brokers"):
        run(query.order, spark)


@pytest.mark.parametrize("query", [False], indirect=True)
def test_a_stop_within_a_batch_ends_the_query_in_order(query: Query, spark: Any) -> None:
    """Spark takes it for a stop."""
    publish(query.world, 0, 100)
    stop_in_batch(query.order, spark)
    assert query.world.sql("SELECT count(*) FROM plain") == [(0,)]


@pytest.mark.long
@pytest.mark.parametrize("query", [False], indirect=True)
def test_a_stop_within_a_batch_leaves_no_stack_trace(query: Query) -> None:
    """In the log of Spark."""
    publish(query.world, 0, 100)
    done = query.child(stop_in_batch=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "StackOverflowError" not in done.stderr
    assert "terminated with error" not in done.stderr
    assert query.world.sql("SELECT count(*) FROM plain") == [(0,)]


def test_wrong_arguments_are_refused_before_anything_is_written(
    make_world: Any, spark: Any
) -> None:
    world: World = make_world(1)
    rate = spark.readStream.format("rate").load()
    good = {"name": world.name, "url": world.url, "table": "r", "checkpoint": "/nowhere"}

    def refused(kind: type[OncelyError], match: str, df: Any = rate, **more: Any) -> None:
        with pytest.raises(kind, match=match):
            write_stream(df, **(good | more))

    refused(ConfigError, "^name: found 'a b'", name="a b")
    refused(ConfigError, "^df: is not a streaming", df=spark.range(3))
    refused(ConfigError, "^url: ", url="mysql://x/y")
    refused(ConfigError, "^keys: is missing", mode="upsert")
    refused(ConfigError, "^mode: found 'replace'", mode="replace")
    world.sql("CREATE TABLE r (value text)")
    refused(TableMismatch, "no column 'timestamp'")
    assert world.sql("SELECT to_regclass('oncely_pipelines')") == [(None,)]


@pytest.mark.parametrize("query", [True], indirect=True)
def test_state_is_seen_in_the_plan(query: Query, spark: Any) -> None:
    frame = frame_of(spark, query.order)
    plain = frame_of(spark, query.order | {"stateful": False})
    static = spark.range(3)
    assert is_stateful(frame)
    assert is_stateful(plain.dropDuplicates(["id"]))
    assert is_stateful(plain.distinct())
    assert is_stateful(plain.limit(3))
    assert is_stateful(plain.join(plain.withColumnRenamed("offset", "o"), "id"))
    assert not is_stateful(plain.where("id > 3"))
    assert not is_stateful(plain.join(static, "id"))
    assert not is_stateful(plain.join(static.groupBy("id").count(), "id"))
