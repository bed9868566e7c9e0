"""The benchmark of audits: a report that names anything but the damage scores nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from bench.audit import Place, damages, wrong
from bench.workload import PARTITIONS
from oncely.audit import Report
from oncely.audit.report import Finding, Undecided
from oncely.core.ranges import TopicPartition

RECORDS = 1_000
NOW = datetime(2026, 1, 1, tzinfo=UTC)
CLEAN = Report("audited", None, "offsets", NOW, 1.0, RECORDS, RECORDS, 0)


def damaged() -> Report:
    findings = [
        Finding(TopicPartition("audit", Place.of(number).partition), Place.of(number).offset, kind)
        for kind, ids in damages(RECORDS).items()
        for number in ids
    ]
    return replace(CLEAN, findings=findings, found=Counter(one.kind for one in findings))


@pytest.mark.parametrize("records", [10, 1_000, 200_000, 10_000_000])
def test_ten_records_are_damaged_in_all_ways_and_all_partitions(records):
    done = damages(records)
    ids = [number for some in done.values() for number in some]
    assert len(ids) == len(set(ids)) == 10
    assert all(0 <= number < records for number in ids)
    assert {kind: len(some) for kind, some in done.items()} == {
        "lost": 4,
        "duplicated": 3,
        "altered": 3,
    }


def test_places_are_those_of_the_published_records():
    places = [Place.of(number) for number in range(RECORDS)]
    for partition in range(PARTITIONS):
        offsets = [one.offset for one in places if one.partition == partition]
        assert offsets == list(range(RECORDS // PARTITIONS))


def test_right_reports_score():
    assert wrong(CLEAN, RECORDS, {}) is None
    assert wrong(damaged(), RECORDS, damages(RECORDS)) is None


@pytest.mark.parametrize(
    "report",
    [
        damaged(),
        replace(CLEAN, records=RECORDS - 1),
        replace(CLEAN, undecided=[Undecided(None, None, "gone")]),
    ],
)
def test_a_clean_table_must_be_clean_and_whole(report):
    assert wrong(report, RECORDS, {})


@pytest.mark.parametrize(
    "change",
    [
        {"findings": damaged().findings[1:]},
        {"findings": [*damaged().findings, Finding(None, None, "unexpected")]},
        {"findings": [replace(damaged().findings[0], kind="altered"), *damaged().findings[1:]]},
        {"found": Counter(lost=11)},
        {"undecided": [Undecided(None, None, "gone")]},
        {"findings": [], "found": Counter()},
    ],
)
def test_each_damage_must_be_named_and_nothing_else(change):
    assert wrong(replace(damaged(), **change), RECORDS, damages(RECORDS))
