"""A Spark transform with GROUP BY, a join and UNION takes effect exactly once, by batch commit."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from oncely.config import parse
from oncely.core import events
from oncely.errors import ConfigError, Stopped, Unavailable
from oncely.pipeline import Pipeline
from oncely.stores.sql.connection import Connection, Dialect, TableName, connect
from tests.scenarios.world import World, produce


def totals(rows: DataFrame) -> DataFrame:
    """Per group: how many, and the sum of ids; joined with names; and one row for all."""
    spark = rows.sparkSession
    names = spark.createDataFrame(
        [(f"g{i}", f"group {i}") for i in range(7)], "grp STRING, name STRING"
    )
    groups = rows.groupBy("grp").agg(F.count("*").alias("n"), F.sum("id").alias("total"))
    joined = groups.join(names, "grp").select("name", "n", "total")
    everything = rows.agg(F.count("*").alias("n"), F.sum("id").alias("total"))
    return joined.union(everything.select(F.lit("all").alias("name"), "n", "total"))


def random_groups(rows: DataFrame) -> DataFrame:
    return rows.withColumn("r", (F.rand() * 3).cast("int")).groupBy("r").count()


def late_random(rows: DataFrame) -> DataFrame:
    return rows.groupBy("grp").count().withColumn("r", F.rand())


def too_long(rows: DataFrame) -> DataFrame:
    return rows.select(F.lit("x\x00y").alias("name"))


def settings(world: World, function: str, **sink: Any) -> Any:
    description = world.settings(
        transform={"spark": f"tests.scenarios.test_spark_transform:{function}"},
        sink={"keep_source": False, "max_rejects": "100%", **sink},
        spark={"max_records_per_batch": 1_000},
    )
    return parse(description)


def publish(world: World) -> None:
    world.publish(3_000, partitions=2)
    produce(world.brokers, world.topic, [(i % 2, b"k", b"bad %d" % i) for i in range(10)])


def test_group_by_join_and_union(make_world: Any, spark: Any) -> None:
    world: World = make_world(2)
    publish(world)
    Pipeline(settings(world, "totals")).run("latest", spark=spark)
    expect_all(world)


def test_the_rows_of_a_run_are_those_that_the_table_got(make_world: Any, spark: Any) -> None:
    world: World = make_world(2)
    world.publish(3_000, partitions=2)
    heard: list[events.Event] = []
    Pipeline(settings(world, "totals")).run("latest", spark=spark, listener=heard.append)
    batches = [one for one in heard if isinstance(one, events.BatchCommitted)]
    assert len(batches) > 1
    assert sum(one.rows for one in batches) == world.count()
    ranges = [one for one in heard if isinstance(one, events.RangeCommitted)]
    assert sum(one.rows for one in ranges) == world.count()


def expect_all(world: World) -> None:
    n, total = 3_000, sum(range(3_000))
    assert world.sql("SELECT sum(n), sum(total) FROM rows WHERE name = 'all'") == [(n, total)]
    assert world.sql("SELECT sum(n), sum(total) FROM rows WHERE name <> 'all'") == [(n, total)]
    assert world.sql(
        'SELECT count(*), count(DISTINCT ("partition", "offset")) FROM oncely_rejects'
    ) == [(10, 10)]
    assert world.sql('SELECT sum("position") FROM oncely_positions') == [(3_010,)]


class LosesAnswers:
    """COMMIT of a publication goes through, and its answer is lost, every second time."""

    published = 0

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self._publishing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, table: TableName, *rest: Any, **options: Any) -> Any:
        self._publishing |= table.name == "rows"
        return self._inner.copy(table, *rest, **options)

    def commit(self) -> None:
        self._inner.commit()
        if self._publishing:
            self._publishing = False
            LosesAnswers.published += 1
            if LosesAnswers.published % 2:
                raise Unavailable("the answer to COMMIT was lost")


def losing_answers(dialect: Dialect, application: str) -> Connection:
    return LosesAnswers(connect(dialect, application))  # type: ignore[return-value]


def test_lost_commit_answers(make_world: Any, spark: Any) -> None:
    world: World = make_world(2)
    publish(world)
    Pipeline(settings(world, "totals")).replaced(connect=losing_answers).run("latest", spark=spark)
    expect_all(world)
    assert LosesAnswers.published > 1


def test_random_values_before_a_shuffle_are_refused(make_world: Any, spark: Any) -> None:
    world: World = make_world(1)
    world.publish(10, partitions=1)
    pipeline = Pipeline(settings(world, "random_groups"))
    with pytest.raises(ConfigError, match="not deterministic"):
        pipeline.row_schema(spark)  # as `plan` asks for the columns
    with pytest.raises(ConfigError, match="not deterministic"):
        pipeline.run("latest", spark=spark)
    tables = "SELECT count(*) FROM pg_class WHERE relname LIKE 'oncely%'"
    assert world.sql(tables) == [(0,)], "refused before anything was written"


def test_random_values_after_the_last_shuffle_are_fine(make_world: Any, spark: Any) -> None:
    world: World = make_world(1)
    world.publish(70, partitions=1)
    Pipeline(settings(world, "late_random")).run("latest", spark=spark)
    assert world.sql('SELECT sum("count") FROM rows') == [(70,)]


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("python", "exits_in_a_worker"),
        ("spark", "exits_in_a_batch"),
        ("spark", "exits_in_a_function"),
    ],
)
def test_a_transform_that_exits_is_a_wrong_input(
    make_world: Any, spark: Any, kind: str, function: str
) -> None:
    """It must not end the run by an exit code of its own: 3 says that a newer run is there."""
    world: World = make_world(1)
    world.publish(10, partitions=1)
    transform = {kind: f"tests.scenarios.transforms:{function}"}
    description = world.settings(transform=transform, sink={"keep_source": False})
    with pytest.raises(ConfigError, match=f"transform.{kind}: .*sys.exit"):
        Pipeline(parse(description)).run("latest", spark=spark)
    assert world.sql('SELECT "position" FROM oncely_positions') == [(0,)]


def test_a_row_that_the_table_refuses_stops_the_pipeline(make_world: Any, spark: Any) -> None:
    world: World = make_world(1)
    world.publish(10, partitions=1)
    with pytest.raises(Stopped, match="Spark transform"):
        Pipeline(settings(world, "too_long")).run("latest", spark=spark)
    assert world.count() == 0
    assert world.sql('SELECT "position" FROM oncely_positions') == [(0,)]
