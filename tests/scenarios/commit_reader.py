"""The independent reader of the commit scenarios.

It speaks SQL through the plain drivers and knows the topic; it uses none of the code that wrote.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

from oncely.core.ranges import TopicPartition
from tests.scenarios import commit_jobs as jobs
from tests.scenarios.commit_topic import PER_PARTITION, REFUSED, Task, topic
from tests.scenarios.zygote import Zygote
from tests.sinktools import Place

_numbers = itertools.count()


def new_task(kind: str, place: Place) -> Task:
    return Task(kind, place, f"t{next(_numbers)}")


def expected_rows(kind: str, below: dict[int, int]) -> list[tuple[Any, ...]]:
    """The rows that the records below the positions make, by partition and offset."""
    wanted: list[tuple[Any, ...]] = []
    for tp, records in topic(kind).items():
        table: dict[Any, tuple[Any, ...]] = {}
        for one in records:
            if one.offset >= below[tp.partition]:
                break
            if one.deletes is not None:
                table.pop(one.deletes["id"], None)
            for row in one.rows:
                if row["name"] in (REFUSED, "twice") or row["id"] is None:
                    continue
                source = (tp.topic, tp.partition, one.offset)
                old = table.get(row["id"])
                if old is None or "v" not in row or old[1] <= row["v"]:
                    table[row["id"]] = (*row.values(), *(() if "batch" in kind else source))
        wanted += table.values()
    return sorted(wanted, key=str)


def expected_rejects(kind: str, below: dict[int, int]) -> list[tuple[int, int]]:
    return sorted(
        (tp.partition, one.offset)
        for tp, records in topic(kind).items()
        for one in records
        if one.offset < below[tp.partition]
        and (
            one.bad
            or any(row["name"] in (REFUSED, "twice") or row["id"] is None for row in one.rows)
        )
    )


def look(task: Task) -> dict[int, int]:
    """Check the database in one snapshot: rows, rejects and history below the positions.

    Returns:
        The positions.
    """
    name = task.name
    with closing(task.place.session()) as session:
        session.execute(
            "BEGIN ISOLATION LEVEL REPEATABLE READ" if task.place.is_postgres else "BEGIN"
        )

        def read(text: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in session.execute(text).fetchall()]

        mine = f"WHERE pipeline = '{name}'"
        positions = dict(read(f'SELECT "partition", "position" FROM oncely_positions {mine}'))
        columns = "*" if task.kind != "staged append" or not task.place.is_postgres else (
            "id, host(name), kafka_topic, kafka_partition, kafka_offset")  # fmt: skip
        place = "ctid" if task.place.is_postgres else "rowid"
        rows = read(f"SELECT {columns} FROM {name} ORDER BY {place}")
        rejects = read(f'SELECT "partition", "offset" FROM oncely_rejects {mine} ORDER BY 1, 2')
        history = read(
            'SELECT "partition", range_start, range_end, written, rejected FROM oncely_ranges'
            f" {mine} ORDER BY 1, 2"
        )
    assert sorted(rows, key=str) == expected_rows(task.kind, positions)  # none lost, none doubled
    assert rejects == expected_rejects(task.kind, positions)
    check_history(history, positions)
    if not task.is_batch:
        assert sum(one[4] for one in history) == len(rejects)
    if not task.is_upsert and not task.is_batch:
        assert sum(one[3] for one in history) == len(rows)
        for number in positions:
            offsets = [row[-1] for row in rows if row[-2] == number]
            assert offsets == sorted(offsets)  # in the order of the topic
    return positions


def check_history(history: list[tuple[Any, ...]], positions: dict[int, int]) -> None:
    """It covers every offset below the position, once."""
    for number, position in positions.items():
        at = 0
        for _, start, end, *_ in [one for one in history if one[0] == number]:
            assert start == at
            at = end
        assert at == position


END = {0: PER_PARTITION + 2, 1: PER_PARTITION + 2}


def check_restart(zygote: Zygote, task: Task, *partitions: TopicPartition) -> None:
    """A new run writes what is left; of some partitions when they are named."""
    ended = zygote.run(jobs.restart, task, *partitions)
    assert not ended.error, ended.error
    numbers = {tp.partition for tp in partitions} or END.keys()
    assert {at: end for at, end in look(task).items() if at in numbers} == {
        number: END[number] for number in numbers
    }
