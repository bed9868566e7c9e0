"""Reports for the tests of their outputs."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

from oncely.audit.report import CompleteUntil, Finding, Hour, PartitionResult, Report, Undecided
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition

AT = datetime(2026, 11, 22, 18, 30, 12, tzinfo=UTC)
P0, P1, P2 = (TopicPartition("orders", n) for n in range(3))
HOSTILE = "</td><script>alert(1)</script>&\"' \u202eevil\x00\ud800\ufffe]]>"


def partition(tp: TopicPartition, differing: tuple[OffsetRange, ...] = ()) -> PartitionResult:
    return PartitionResult(tp, OffsetRange(0, 40_000), 41_200, 80, differing, 39_600, 39_600, 400)


def hours(damage: bool) -> list[Hour]:
    made = []
    for at in range(48):
        moment = f"{AT.replace(hour=0, minute=0, second=0) + timedelta(hours=at):%Y-%m-%d %H:%M:%S}"
        ids = 2_000 + 900 * ((at * 7) % 11)
        missing = 600 if damage and at == 17 else 3 if damage and at == 31 else 0
        twice = 5 if damage and at == 22 else 0
        strange = 2 if damage and at in (40, 41) else 0
        made.append(Hour(moment, ids, ids - missing + strange, missing, twice, strange))
    return made


def clean() -> Report:
    return Report(
        "orders", SourceIdentity("MkU3", {"orders": "aZ9-_x"}), "offsets", AT, 12.345,
        118_800, 118_800, 1_200, partitions=[partition(P0), partition(P1), partition(P2)],
        hours=hours(False), complete_until=CompleteUntil(AT, AT),
    )  # fmt: skip


def damaged() -> Report:
    findings = [
        *(Finding(P1, 17_000 + n, "lost", f"id {n}: 1 record, no row") for n in range(40)),
        Finding(P0, 31_007, "duplicated", "2 rows for 1 record"),
        Finding(P0, 31_008, "altered", "amount differs"),
        Finding(None, None, "unexpected", f"id {HOSTILE}: 1 row, no record"),
    ]
    found: Counter = Counter(lost=603, duplicated=1, altered=1, unexpected=1)
    return Report(
        "orders", SourceIdentity("MkU3", {"orders": "aZ9-_x"}), "offsets", AT, 31.5,
        118_800, 118_197, 1_200, findings, found,
        [Undecided(P2, OffsetRange(100, 5_000), "records were deleted by retention")],
        [
            partition(P0, (OffsetRange(31_000, 31_500),)),
            partition(P1, (OffsetRange(17_000, 17_500), OffsetRange(30_000, 30_001))),
            partition(P2),
        ],
        hours(True), CompleteUntil(AT - timedelta(hours=7), AT - timedelta(hours=7)),
    )  # fmt: skip


def unknown() -> Report:
    return Report(
        HOSTILE, None, "content", AT, 3.0, 10, 9, 0,
        undecided=[
            Undecided(P0, OffsetRange(0, 100), f"of {HOSTILE}"),
            Undecided(None, None, "3 records of the left side have no id (it is null)"),
        ],
        partitions=[partition(P0)],
    )  # fmt: skip
