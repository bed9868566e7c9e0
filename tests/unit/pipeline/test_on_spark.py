"""`oncely work --on spark`: what is refused, and whose events are told."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError, WrongInput
from oncely.pipeline import Pipeline
from oncely.pipeline.on_spark import _opening, _Together, _Work, check, planned_workers

T0 = TopicPartition("t", 0)


def pipeline(**tables: object) -> Pipeline:
    given: dict[str, object] = {
        "name": "p",
        "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": "postgresql://u:very-secret@h/d", "table": "rows"},
    }
    return Pipeline(parse({**given, **tables}))


@pytest.mark.parametrize(
    ("master", "members"),
    [("local[3]", 3), ("local[2,4]", 1), ("local", 1), ("spark://h:7077", 50), ("yarn", 50),
     ("local-cluster[2,2,1024]", 50)],
)  # fmt: skip
def test_each_member_needs_a_place(master: str, members: int) -> None:
    check(pipeline(), members, master)


@pytest.mark.parametrize(("master", "members"), [("local", 2), ("local[2,4]", 3)])
def test_more_members_than_a_local_master_runs_are_refused(master: str, members: int) -> None:
    with pytest.raises(ConfigError, match=r"^spark\.master") as caught:
        check(pipeline(), members, master)
    assert f"local[{members},4]" in caught.value.way_out


@pytest.mark.parametrize(
    ("master", "slots", "said"),
    [
        ("local[2,4]", 0, "local[2,4] runs up to 2 workers; more than 3, "),
        ("yarn", 0, "yarn runs a worker for each task slot that it is given; more than 3, "),
        ("yarn", 8, "yarn runs up to 8 workers; more than 3, "),
    ],
)
def test_a_plan_tells_the_members_of_a_job(master: str, slots: int, said: str) -> None:
    assert said in planned_workers(pipeline(spark={"master": master}), slots, 3)


def test_a_plan_tells_why_a_job_can_have_no_members() -> None:
    static = pipeline(worker={"instance": "w", "protocol": "consumer"})
    assert "can't run it: worker.instance" in planned_workers(static, 0, 3)
    assert planned_workers(pipeline(delivery="at_least_once"), 0, 3) == ""


def test_what_no_worker_can_run_is_refused() -> None:
    with pytest.raises(WrongInput, match="nobody"):
        check(pipeline(), 0, "yarn")
    with pytest.raises(ConfigError, match=r"^delivery"):
        check(pipeline(delivery="at_least_once"), 2, "yarn")


def test_each_static_member_has_a_name_of_its_own() -> None:
    given = pipeline(worker={"instance": "w", "protocol": "eager"})
    check(given, 2, "yarn")
    names = [_Work(given, None)._numbered(n).settings.worker.instance for n in (0, 1)]
    assert names == ["w-0", "w-1"]
    assert _Work(pipeline(), None)._numbered(1).settings.worker.instance is None
    with pytest.raises(ConfigError, match=r"^worker\.instance"):
        check(pipeline(worker={"instance": "w", "protocol": "consumer"}), 2, "yarn")


def test_a_pipeline_is_sent_without_what_it_has_made() -> None:
    used = pipeline()
    assert used.source and used.decoder and used.row_transform  # noqa: PT018
    sent = pickle.loads(pickle.dumps(_Work(replace(used), "latest")))
    assert sent.pipeline.settings == used.settings
    assert "source" not in vars(sent.pipeline)
    assert "very-secret" not in repr(sent)


def test_members_are_told_as_one_run() -> None:
    told: list[events.Event] = []
    together = _Together(told.append)
    assigned = events.PartitionsChanged("assigned", frozenset({T0}))
    for one in (
        assigned,
        events.PartitionsChanged("revoked", frozenset({T0})),
        events.PartitionsChanged("lost", frozenset({T0})),
        events.Draining(),
        events.Draining(),
        events.RunClosed(complete=True),
    ):
        together(one)
    assert told == [assigned, events.Draining()]


def test_in_the_event_log_each_member_is_a_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    opened = _opening(pipeline(), log, lambda _: None)
    for _ in range(2):
        with opened() as listener:
            listener(events.PartitionsChanged("revoked", frozenset({T0})))
            listener(events.RunClosed(complete=True))
    lines = [json.loads(one) for one in log.read_text().splitlines()]
    assert len({one["run"] for one in lines}) == 2
    assert [one["type"] for one in lines] == ["started", "partitions_revoked", "closed"] * 2
