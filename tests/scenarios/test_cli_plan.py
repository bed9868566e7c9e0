"""`oncely plan` finds out what can be found out without writing, and tells all of it at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from oncely.config import parse
from oncely.kafka.source import KafkaSource
from oncely.pipeline import Pipeline, planning
from oncely.runtimes.spark.session import refusals
from tests.scenarios.commands import oncely, oncely_json, run
from tests.scenarios.world import World, produce


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(3)
    world.publish(30, partitions=3)
    return world


def tables(world: World) -> set[str]:
    rows = world.sql("SELECT relname FROM pg_class WHERE relkind = 'r'"
                     " AND relnamespace = 'public'::regnamespace")  # fmt: skip
    return {name for (name,) in rows}


def problems(plan: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["message"] for one in plan["problems"]}


def test_a_new_pipeline_can_run_and_nothing_is_written(world: World) -> None:
    plan = oncely_json("plan", world.file())
    assert plan["can_run"]
    assert plan["problems"] == []
    assert plan["guarantee"]["commit"] == "partition"
    assert plan["source"]["partitions"] == 3
    assert plan["source"]["offsets"] == 30
    assert plan["source"]["begins"] == "earliest (first start)"
    assert plan["sink"]["exists"] is False
    assert plan["sink"]["columns"][0] == {"name": "id", "rows": "int64", "table": "bigint"}
    assert (plan["connections"]["tasks"], plan["connections"]["total"]) == (2, 4)
    assert plan["connections"]["room"]["limit"] > 10
    assert plan["acls"][0].endswith(f"--operation Read --operation Describe --topic {world.topic}")
    assert f"--group oncely-{world.name}" in plan["acls"][1]
    assert tables(world) == set()
    client = AdminClient({"bootstrap.servers": world.brokers})
    groups = client.list_consumer_groups(request_timeout=60).result(120)
    assert not [one for one in groups.valid if world.name in one.group_id]


def test_its_ddl_is_enough_for_who_may_not_create(world: World, runtime: Any) -> None:
    plan = oncely_json("plan", world.file())
    for statement in plan["ddl"]:
        world.sql(statement)
    file = world.file(sink={"create": False})
    assert oncely_json("plan", file)["can_run"]
    Pipeline(parse(world.settings(sink={"create": False}))).run("latest", spark=runtime)
    assert world.count() == 30
    again = oncely_json("plan", file)
    assert again["epoch"] == 1
    assert again["source"]["begins"] == "where epoch 1 has ended"
    assert again["source"]["offsets"] == 0


def test_a_transform_that_prints_leaves_json_alone(world: World) -> None:
    transform = {"python": "tests.scenarios.transforms:prints"}
    assert oncely_json("plan", world.file(transform=transform), alone=True)["can_run"]


def test_batches_beyond_the_bound_of_a_response_are_told(world: World) -> None:
    kafka = {"fetch.max.bytes": 1_000_000, "receive.message.max.bytes": 1_000_512}
    notes = oncely_json("plan", world.file(source={"kafka": kafka}))["notes"]
    assert any(f"{world.topic} accepts batches of 1,048,588 bytes" in one for one in notes)
    assert not any("accepts batches" in one for one in oncely_json("plan", world.file())["notes"])


def test_the_screen_says_what_matters(world: World) -> None:
    """A terminal of 80 by 24 shows all of it above the prompt; the first run is told last."""
    said = oncely("plan", world.file()).stdout
    for one in ("exactly once, by partition commit", "it can run", "up to 4 connections"):
        assert one in said
    lines = said.rstrip().splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    last = " ".join(" ".join(lines[-4:]).split())
    assert "first run reads 30 offsets from earliest, makes rows, oncely_pipelines," in last
    more = oncely("plan", world.file(), "--ddl", "--guarantee").stdout
    for one in ("CREATE TABLE IF NOT EXISTS", "kafka-acls --bootstrap-server", "  ends ", "bigint"):
        assert one in more
        assert one not in said
    assert urlsplit(world.url).password not in said + more


def test_the_screen_of_a_later_start_tells_of_no_first_run(world: World) -> None:
    oncely("work", world.file(), "--until", "latest")
    said = oncely("plan", world.file()).stdout
    assert "begins    where epoch " in said
    assert "first run" not in said


def test_the_screen_says_what_commands_refuse(world: World) -> None:
    """One line for one reason, with the way out; and nothing where nothing is refused."""
    assert "  can't  " not in oncely("plan", world.file()).stdout
    key = {"format": "json", "schema": "id BIGINT NOT NULL"}
    file = world.file(sink={"mode": "upsert", "keys": ["id"]}, decode={"key": key})
    said = " ".join(oncely("plan", file).stdout.split())
    assert " can't oncely rejects replay, repair, backfill: sink.version: is missing: a" in said
    assert "; name a column that grows with each change;" in said
    (replay, *_, backfill) = oncely_json("plan", file)["impossible"]
    assert replay == backfill | {"operation": "oncely rejects replay"}
    assert set(replay) == {"operation", "key", "reason", "way_out"}


def test_all_problems_are_told_at_once(world: World) -> None:
    world.sql("CREATE TABLE rows (id date)")
    file = world.file(source={"topics": [world.topic, "nowhere"]}, sink={"create": False})
    plan = oncely_json("plan", file, expect=2)
    found = problems(plan)
    assert "'nowhere'" in found["source.topics"]
    assert "'id' is date" in found["sink.table"]
    assert "ledger's tables are missing" in found["sink.create"]
    assert all(one["way_out"] for one in plan["problems"])


def test_servers_that_are_away_are_no_wrong_input(world: World) -> None:
    file = world.file(source={"brokers": "127.0.0.1:1"},
                      sink={"url": "postgresql://u:p@127.0.0.1:2/x"})  # fmt: skip
    plan = oncely_json("plan", file, expect=1)
    assert set(problems(plan)) == {"source.brokers", "sink.url"}


class TestPrivileges:
    """Of a role that owns nothing."""

    @pytest.fixture
    def role(self, world: World) -> Any:
        name = world.name.replace("-", "_")
        world.sql(f"CREATE ROLE {name} LOGIN PASSWORD 'pw-{name}'")
        yield name
        with psycopg.connect(world.url, autocommit=True) as database:
            database.execute(f"DROP OWNED BY {name}".encode())
            database.execute(f"DROP ROLE {name}".encode())

    def url(self, world: World, role: str) -> str:
        parts = urlsplit(world.url)
        place = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{role}:pw-{role}@{place}"))

    def lacks(self, world: World, role: str, expect: int = 2, **more: Any) -> str:
        sections = {"sink": {"url": self.url(world, role), **more.pop("sink", {})}, **more}
        plan = oncely_json("plan", world.file(**sections), "--no-spark", expect=expect)
        return "\n".join(one["message"] for one in plan["problems"])

    def grant_ledger(self, world: World, role: str) -> None:
        for privileges, of in [("INSERT, UPDATE", ("pipelines", "positions")),
                               ("INSERT, DELETE", ("ranges", "rejects"))]:  # fmt: skip
            names = ", ".join(f"oncely_{one}" for one in of)
            world.sql(f"GRANT SELECT, {privileges} ON {names} TO {role}")

    def test_who_may_not_create_tables(self, world: World, role: str) -> None:
        missing = self.lacks(world, role)
        assert f"GRANT CREATE ON SCHEMA public TO {role}" in missing
        world.sql(f"GRANT CREATE ON SCHEMA public TO {role}")
        assert self.lacks(world, role, expect=0) == ""

    def test_who_may_not_write(self, world: World, role: str) -> None:
        for statement in oncely_json("plan", world.file())["ddl"]:
            world.sql(statement)
        missing = self.lacks(world, role, sink={"create": False})
        assert f"GRANT INSERT ON rows TO {role}" in missing
        assert f"GRANT SELECT, INSERT, UPDATE ON oncely_positions TO {role}" in missing
        assert "oncely_amendments" not in missing
        world.sql(f"GRANT INSERT ON rows TO {role}")
        self.grant_ledger(world, role)
        assert self.lacks(world, role, expect=0, sink={"create": False}) == ""

    def test_privileges_on_columns_are_enough(self, world: World, role: str, runtime: Any) -> None:
        for statement in oncely_json("plan", world.file())["ddl"]:
            world.sql(statement)
        world.sql("ALTER TABLE rows ADD COLUMN other text")
        ((names,),) = world.sql(
            "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute"
            " WHERE attrelid = 'rows'::regclass AND attnum > 0 AND attname <> 'other'"
        )
        world.sql(f"GRANT INSERT ({names}) ON rows TO {role}")
        self.grant_ledger(world, role)
        assert self.lacks(world, role, expect=0, sink={"create": False}) == ""
        settings = world.settings(sink={"create": False, "url": self.url(world, role)})
        Pipeline(parse(settings)).run("latest", spark=runtime)
        assert world.count() == 30

    @pytest.mark.parametrize("there", [True, False], ids=["exist", "are created"])
    @pytest.mark.parametrize("mode", ["append", "upsert"])
    def test_exactly_what_it_prints_is_enough(
        self, world: World, role: str, runtime: Any, mode: str, there: bool
    ) -> None:
        """Nobody may create temporary tables; a column's default takes a sequence."""
        (database,), *_ = world.sql("SELECT current_database()")
        world.sql(f'REVOKE TEMP ON DATABASE "{database}" FROM PUBLIC')
        sink = {"mode": mode, "keys": ["k"]} if mode == "upsert" else {}
        if sink:
            world.overrides = {"decode": {"key": {"format": "string", "column": "k"}}}
        for statement in oncely_json("plan", world.file(sink=sink))["ddl"] if there else ():
            world.sql(statement)
        if there:
            world.sql("ALTER TABLE rows ADD COLUMN number serial")
        lacking = self.lacks(world, role, sink=sink).splitlines()
        for one in lacking:
            world.sql(one.partition("lacks: ")[2].partition(", or somebody")[0])
        assert self.lacks(world, role, expect=0, sink=sink) == ""
        settings = world.settings(sink={**sink, "url": self.url(world, role)})
        Pipeline(parse(settings)).run("latest", spark=runtime)
        assert world.count() == 30

    def test_each_command_needs_what_is_printed_for_it(self, world: World, role: str) -> None:
        wide = b'{"id": 1099511627776, "grp": "", "pad": ""}'
        produce(world.brokers, world.topic, [(0, b"k", wide), (0, b"k", b"no JSON")])
        for statement in oncely_json("plan", world.file())["ddl"]:
            world.sql(statement)
        sink = {"create": False, "url": self.url(world, role), "max_rejects": 100}
        file = world.file(sink=sink)
        for one in self.lacks(world, role, sink=sink).splitlines():
            world.sql(one.partition("lacks: ")[2])
        narrow = {"schema": "id INT NOT NULL, grp STRING, pad STRING"}
        oncely("run", world.file(sink=sink, decode=narrow), "--until", "latest")
        notes = [one for one in oncely_json("plan", file)["notes"] if "more than a run" in one]
        notes.sort(key=lambda one: "reset" in one)  # it removes the dead letters
        how = {"offsets": "--to-offset 0 --execute", "repair": "--execute", "discard": "--yes"}
        for note in notes:
            verb = note.split("`")[1].split()[1:]
            more = next((how[one].split() for one in reversed(verb) if one in how), [])
            world.sql("DELETE FROM rows WHERE kafka_offset = 1")
            needed = note.partition("a run: ")[2].split("; ")
            for one in needed:
                denied = run(*verb, file, *more)
                assert denied.returncode not in (0, 4), (one, denied.stdout)
                assert re.search("permission denied|may not read", denied.stderr), one
                world.sql(one)
            done = run(*verb, file, *more)
            print(note, done.returncode, done.stdout, done.stderr)
            assert "permission denied" not in done.stderr
            for one in needed:
                world.sql(one.replace("GRANT", "REVOKE").replace(" TO ", " FROM "))
        assert len(notes) == 5

    def test_a_batch_commit_creates_no_tables(self, world: World, role: str) -> None:
        for statement in oncely_json("plan", world.file())["ddl"]:
            world.sql(statement)
        missing = self.lacks(
            world, role, transform={"spark": "tests.scenarios.transforms:counted"},
            sink={"create": False, "keep_source": False},
        )  # fmt: skip
        assert "GRANT INSERT ON rows" in missing
        assert "CREATE" not in missing

    def test_a_schema_that_does_not_exist(self, world: World, role: str) -> None:
        assert "the schema nowhere" in self.lacks(world, role, sink={"table": "nowhere.rows"})


def test_a_topic_that_was_made_again(world: World, runtime: Any, broker: Any) -> None:
    Pipeline(parse(world.settings())).run("latest", spark=runtime)
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, 3)
    found = problems(oncely_json("plan", world.file(), expect=2))
    assert "deleted and recreated" in found["source.topics"]
    status = oncely("status", world.file())
    assert "was deleted and recreated" in status.stderr


@pytest.mark.usefixtures("spark")
def test_a_spark_transform_is_asked_for_its_columns(world: World) -> None:
    transform = {"spark": "tests.scenarios.transforms:counted"}
    file = world.file(transform=transform, sink={"keep_source": False})
    plan = oncely_json("plan", file)
    assert plan["guarantee"]["commit"] == "batch"
    assert any("GROUP BY" in one for one in plan["guarantee"]["ends"])
    assert [one["name"] for one in plan["sink"]["columns"]] == ["id", "grp", "n"]
    assert plan["executors"][0]["missing"] == []
    assert plan["executors"][0]["oncely"]
    without = oncely_json("plan", file, "--no-spark")
    assert without["executors"] is None
    assert any("not known" in one for one in without["notes"])


@pytest.mark.usefixtures("spark")
def test_a_spark_transform_that_fails_is_told(world: World) -> None:
    transform = {"spark": "tests.scenarios.transforms:fails"}
    file = world.file(transform=transform, sink={"keep_source": False})
    found = problems(oncely_json("plan", file, expect=2))
    assert "no_such_column" in found["transform.spark"]
    run = oncely("run", file, "--until", "latest", expect=2)
    assert "transform.spark" in run.stderr
    assert "no_such_column" in run.stderr
    assert tables(world) == set()


def test_executors_that_lack_a_package_are_told(world: World, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    file = world.file(spark={"conf": {"spark.pyspark.python": str(bare / "bin" / "python")}})
    found = oncely_json("plan", file, expect=2, alone=True)["problems"]
    missing = "\n".join(one["message"] for one in found)
    for name in ("oncely", "psycopg", "pgpq", "pyarrow"):
        assert f"{name}: ModuleNotFoundError" in missing
    assert all("spark.pyspark.python" in one["way_out"] for one in found)


def test_executors_that_get_no_answer_from_kafka_are_told(
    world: World, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has a file of [source.kafka] that the executors lack."""
    lacking = {"security.protocol": "SSL", "ssl.ca.location": str(world.folder / "ca.pem")}
    asked = KafkaSource(world.brokers, [world.topic], lacking)
    ((host, why),) = refusals(spark, asked)
    assert "ssl.ca.location failed" in why
    assert refusals(spark, KafkaSource(world.brokers, [world.topic])) == []

    monkeypatch.setattr(planning, "_start", lambda _: spark)
    monkeypatch.setattr("oncely.runtimes.spark.session.stop", lambda _: None)
    monkeypatch.setattr(
        "oncely.runtimes.spark.session.refusals", lambda spark, _: refusals(spark, asked)
    )
    (found,) = Pipeline(parse(world.settings())).plan(use_spark=True).problems
    assert found.key == "source"
    assert found.message == f"an executor on {host} can't read Kafka: {why}"
    assert "at the same paths" in found.way_out
