"""Rows that do not contain their offsets: what a group's counts, digest and values prove."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.audit import content
from oncely.audit.compare import Rules
from oncely.audit.content import Group, Rows, digests_of, recipe_of
from oncely.audit.evidence import Span
from oncely.core.claim import Counts
from oncely.core.digest import Recipe, digest_sum
from oncely.core.expected import ROWS
from oncely.core.ranges import OffsetRange, TopicPartition
from tests.groupedtools import Compared, Topic, compare
from tests.sinktools import SCHEMA, SOURCE, T0, T1, Rec, numbered

RECIPE = str(recipe_of(SCHEMA))
TAGGED = SCHEMA.append(pa.field("tags", pa.list_(pa.string())))  # has no digest
ONE_EACH = Rules()
Row = Mapping[str, Any]


def rows_of(records: Iterable[Rec]) -> list[Row]:
    return [row for one in records for row in one.rows]


def digests(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> Rows:
    table = pa.Table.from_pylist([dict(one) for one in rows], schema=schema)
    return digests_of(table, Recipe.parse(RECIPE), "here")


@dataclass
class Place:
    """A destination with one group."""

    group: Group
    rows: Sequence[Row]
    letters: Sequence[tuple[TopicPartition, int]] = ()
    reads: bool = True
    limits: Sequence[str] = ()
    unexpected: Sequence[Any] = ()
    source: Any = SOURCE
    positions: Mapping[TopicPartition, int] = field(default_factory=dict)
    started: Mapping[TopicPartition, int] = field(default_factory=dict)
    committed: Sequence[Any] = ()
    proof: Any = "content"
    schema: pa.Schema = SCHEMA

    @property
    def groups(self) -> list[Group]:
        return [self.group]

    def recipe(self, group: Group) -> str:
        return RECIPE

    def contents(self, group: Group, recipe: str) -> Iterator[Rows]:
        for at in range(0, len(self.rows), 3):
            yield digests(self.rows[at : at + 3], self.schema)

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        return self.letters

    def close(self) -> None:
        pass


RECORDS = [*numbered(0, 5), Rec(5, bad="odd"), *numbered(7, 10)]  # 6 is a hole
SPANS = (Span(T0, OffsetRange(0, 10)),)
LETTERS = [(T0, 5)]


def stated(records: Sequence[Rec], *, digest: bool = True) -> Counts:
    rows, bad = rows_of(records), sum(bool(one.bad) for one in records)
    filtered = sum(not one.rows and not one.bad for one in records)
    counts = Counts(len(records), len(rows), bad, filtered)
    own = digest_sum(digests(rows).digests) if digest else None
    return replace(counts, digest=own, recipe=RECIPE if digest else "")


def audited(
    rows: Sequence[Row], *, counts: Counts | None = None, topic: Topic | None = None,
    rules: Rules = ONE_EACH, expected: bool = True, **more: Any,
) -> Compared:  # fmt: skip
    """One group with these rows; ``more`` of its fields, or of its place."""
    of_group = {k: more.pop(k) for k in list(more) if k in Group.__dataclass_fields__}
    group = Group(
        **{"name": "files", "spans": SPANS, "rows": len(rows), "stated": counts, **of_group}
    )
    place = Place(group, rows, more.pop("letters", LETTERS), **more)
    return compare(place, topic or Topic({T0: RECORDS}), rules, expected=expected)


GOOD = rows_of(RECORDS)
STATED, COUNTED = stated(RECORDS), stated(RECORDS, digest=False)


@pytest.mark.parametrize("counts", [STATED, COUNTED, None], ids=["digest", "counts", "nothing"])
@pytest.mark.parametrize("reads", [True, False])
def test_a_group_without_damage_is_clean(counts: Counts | None, reads: bool) -> None:
    found = audited(GOOD[::-1], counts=counts, reads=reads)
    assert found.is_clean
    assert (found.records, found.holes) == (9, 1)


@pytest.mark.parametrize(("counts", "reads"), [(STATED, True), (COUNTED, False), (None, False)])
def test_what_the_ledger_proves_is_not_recomputed(counts: Counts | None, reads: bool) -> None:
    topic = Topic({T0: RECORDS})
    assert audited(GOOD, counts=counts, reads=reads, topic=topic).is_clean
    assert topic.asked == []


@pytest.mark.parametrize("counts", [STATED, COUNTED], ids=["digest", "counts"])
def test_each_kind_of_damage_names_its_record(counts: Counts) -> None:
    lost = [row for row in GOOD if row["id"] != 3]
    assert audited(lost, counts=counts).findings == [("lost", T0, 3)]
    twice = [*GOOD, GOOD[7]]
    found = audited(twice, counts=counts)
    assert found.findings == [("duplicated", T0, GOOD[7]["id"])]
    assert "2 rows of 1 records in here" in found.details
    assert audited(GOOD, counts=counts, letters=[]).findings == [("lost", T0, 5)]
    both = audited(GOOD, counts=counts, letters=[*LETTERS, (T0, 8)])
    assert both.findings == [("duplicated", T0, 8)]


def test_a_row_with_other_values_is_altered_if_the_digest_proves_it() -> None:
    changed = [{**row, "name": "x"} if row["id"] == 2 else row for row in GOOD]
    found = audited(changed, counts=STATED)
    assert found.findings == [("altered", T0, 2)]
    assert "other values in here" in found.details


def test_a_damaged_place_with_the_rows_of_its_records_is_told_and_is_no_damage() -> None:
    found = audited(GOOD, counts=STATED, damage=("f.avro: its SHA-256 is another one",))
    assert found.is_clean
    assert found.notes == [
        "f.avro: its SHA-256 is another one; no record is affected: the rows are those of its"
        " records"
    ]
    altered = [{**row, "name": "x"} if row["id"] == 2 else row for row in GOOD]
    found = audited(altered, counts=STATED, damage=("f.avro: its SHA-256 is another one",))
    assert (found.findings, found.notes) == ([("altered", T0, 2)], [])


def test_a_damaged_place_with_columns_that_are_not_compared_is_undecided() -> None:
    rows = [{**row, "tags": ["a"]} for row in GOOD]
    found = audited(rows, counts=STATED, damage=("f.avro: it has 9 bytes",), schema=TAGGED)
    assert found.findings == []
    assert "f.avro: it has 9 bytes; the values of these columns can't be" in found.reasons
    assert "compared: tags" in found.reasons
    assert audited(rows, counts=STATED, schema=TAGGED).is_clean


def test_a_changed_transform_is_no_damage_if_no_digest_tells() -> None:
    now = [replace(one, rows=[{**r, "name": "new"} for r in one.rows]) for one in RECORDS]
    found = audited(GOOD, counts=COUNTED, topic=Topic({T0: now}))
    assert found.findings == []
    assert "a changed transform from damage" in found.reasons
    assert audited(GOOD, counts=STATED, topic=Topic({T0: now})).is_clean


def test_a_changed_transform_hides_names_and_no_loss() -> None:
    now = [replace(one, rows=[{**r, "name": "new"} for r in one.rows]) for one in RECORDS]
    for counts in (STATED, COUNTED):
        found = audited(GOOD[:-2], counts=counts, topic=Topic({T0: now}))
        assert found.numbers == {"lost": 2}
        assert [at for *_, at in found.findings] == [None]


def test_a_row_of_no_record_is_unexpected() -> None:
    found = audited([*GOOD, {"id": 99, "name": "odd"}], counts=STATED)
    assert found.findings == [("unexpected", None, None)]
    assert "in here" in found.details
    assert audited([*GOOD, {"id": 99, "name": "odd"}], counts=STATED, others=True).is_clean


def test_records_with_the_same_values_are_told_apart_by_their_number_only() -> None:
    same = [Rec(n, ({"id": 1, "name": "a"},)) for n in range(4)]
    topic, spans = Topic({T0: same}), (Span(T0, OffsetRange(0, 4)),)
    known = {"topic": topic, "spans": spans, "letters": [], "counts": stated(same)}
    rows = rows_of(same)
    assert audited(rows, **known).is_clean
    assert audited(rows[:3], **known).findings == [("lost", T0, 3)]
    found = audited([*rows, rows[0]], **known)
    assert found.findings == [("duplicated", T0, 0)]
    assert "have the same values: t-0 0, t-0 1, t-0 2" in found.details


def test_a_filtered_record_is_no_loss() -> None:
    records = [*numbered(0, 5), Rec(5), *numbered(6, 10)]
    known = {"topic": Topic({T0: records}), "letters": [], "rules": Rules(filters=True)}
    rows = rows_of(records)
    assert audited(rows, counts=stated(records), **known).is_clean
    assert audited(rows, reads=False, **known).is_clean
    found = audited(rows, reads=False, expected=False, **known)
    assert "can't be recomputed" in found.reasons


def test_records_of_several_rows_are_compared_by_their_sum() -> None:
    records = [replace(one, rows=[*one.rows, {"id": 7, "name": None}]) for one in numbered(0, 10)]
    known = {"topic": Topic({T0: records}), "letters": [], "rules": Rules(several=True)}
    rows = rows_of(records)
    assert audited(rows, **known).is_clean
    assert audited(rows, counts=stated(records), **known).is_clean
    found = audited(rows[:-1], counts=stated(records), **known)
    assert found.numbers == {"lost": 1}
    assert "can't be named" in found.reasons


def test_records_that_the_topic_no_longer_holds_are_proved_by_the_ledger() -> None:
    topic = Topic({T0: RECORDS}, first={T0: 8})
    found = audited(GOOD, counts=STATED, topic=topic)
    assert (found.is_clean, found.records) == (True, 9)
    found = audited(GOOD[1:], counts=STATED, topic=topic)
    assert found.numbers == {"lost": 1}
    unknown = audited(GOOD, topic=topic)
    assert (unknown.findings, "no longer holds" in unknown.reasons) == ([], True)


def test_a_record_that_was_passed_over_is_lost() -> None:
    more = sorted([*RECORDS, *numbered(6, 7)], key=lambda one: one.offset)
    for counts in (STATED, COUNTED):
        found = audited(GOOD, counts=counts, topic=Topic({T0: more}))
        assert found.findings == [("lost", T0, 6)]


def test_a_replayed_dead_letter_has_a_row() -> None:
    now = [Rec(5, ({"id": 5, "name": "now"},)) if one.bad else one for one in RECORDS]
    known = {"topic": Topic({T0: now}), "letters": [], "replayed": 1}
    rows = [*GOOD, {"id": 5, "name": "now"}]
    assert audited(rows, counts=COUNTED, reads=False, **known).is_clean
    assert audited(rows, counts=COUNTED, **known).is_clean
    assert audited(GOOD, counts=COUNTED, **known).findings == [("lost", T0, 5)]


def test_a_group_of_two_partitions_names_both() -> None:
    other = [replace(one, rows=[{**r, "id": 100 + r["id"]} for r in one.rows]) for one in RECORDS]  # type: ignore[operator]
    topic, letters = Topic({T0: RECORDS, T1: other}), [(T0, 5), (T1, 5)]
    known = {"spans": (*SPANS, Span(T1, OffsetRange(0, 10))), "topic": topic, "letters": letters}
    rows = [*GOOD, *rows_of(other)]
    both = stated([*RECORDS, *other])
    assert audited(rows, counts=both, **known).is_clean
    assert audited(rows[1:-1], counts=both, **known).findings == [("lost", T0, 0), ("lost", T1, 9)]


def test_a_doubt_leaves_a_group_undecided() -> None:
    found = audited(GOOD, counts=STATED, doubt="the topic is compacted")
    assert (found.findings, "compacted" in found.reasons) == ([], True)


def test_rows_that_were_added_to_records_of_several_rows_are_told() -> None:
    records = [replace(one, rows=[*one.rows, {"id": 7, "name": None}]) for one in numbered(0, 10)]
    rows, counts = rows_of(records), stated(records, digest=False)
    known = {"topic": Topic({T0: records}), "letters": [], "rules": Rules(several=True)}
    known |= {"counts": counts, "reads": False, "expected": False}
    assert audited(rows, **known).is_clean
    assert audited([*rows, rows[0]], **known).numbers == {"duplicated": 1}


class _Counted(np.ndarray):
    """Counts the elements that comparisons of arrays look at."""

    seen = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        _Counted.seen += max(np.size(one) for one in inputs)
        plain = [np.asarray(one) for one in inputs]
        return getattr(ufunc, method)(*plain, **options)


@pytest.mark.parametrize("damage", ["lost", "duplicated"])
def test_a_comparison_reads_each_digest_a_few_times_whatever_is_missing(
    damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 3_000
    monkeypatch.setattr(_Counted, "seen", 0)
    digest = np.arange(many, dtype=np.uint64)
    group = Group("files", (Span(T0, OffsetRange(0, many)),), rows=0)
    ones = np.ones(many, np.int64)
    records = content._Records(
        group.spans, 0 * ones, np.arange(many), np.full(many, ROWS, np.int8), ones,
        digest.view(_Counted),
    )  # fmt: skip
    found = digest[:0] if damage == "lost" else np.repeat(digest, 2)
    result = content.Result(group, {T0: many}, {T0: 0})
    rows = [Rows(found, lambda _: "here")]
    content._Difference(result, records, found, set(), lambda: rows).settle(certain=True)
    assert [(one.kind, one.offset) for one, _ in result.findings] == [
        (damage, offset) for offset in range(many)
    ]
    assert _Counted.seen < 30 * many
