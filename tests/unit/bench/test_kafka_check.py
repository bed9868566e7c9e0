"""A benchmark's number is worth what its check is worth: each way to be wrong is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench.kafka.check import Expected
from bench.kafka.workload import JOBS, Job, key, outputs
from bench.workload import record

RECORDS = 20_000  # each of the 8,000 keys comes more than once
NOBODY_EXPECTS = "1 records that nobody expects"
Output = dict[int, list[tuple[bytes | None, bytes | None]]]


def output(job: Job) -> Output:
    """What a right run leaves: all records of a key in one partition."""
    found: Output = {p: [] for p in range(4)}
    for i in outputs(job, RECORDS):
        found[int(key(i)) % 4].append((key(i), record(i)))
    return found


@pytest.mark.parametrize("job", JOBS)
def test_a_right_output_is_right(job: Job) -> None:
    assert Expected.of(job, RECORDS).wrong(output(job)) is None


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found: found[2].pop(7), "1 records are missing, 0 doubled"),
        (lambda found: found[1].append(found[1][-1]), "0 records are missing, 1 doubled"),
        (lambda found: found[0].append((key(0), record(RECORDS))), NOBODY_EXPECTS),
        (lambda found: found[0].insert(5, (b"1", found[0].pop(5)[1])), NOBODY_EXPECTS),
        (lambda found: found[0].insert(5, (None, found[0].pop(5)[1])), NOBODY_EXPECTS),
        (lambda found: found[3].insert(5, (found[3].pop(5)[0], None)), ""),
        (lambda found: found[3].reverse(), "partition 3: a key's records are not in order"),
    ],
    ids=["lost", "doubled", "foreign", "another key", "no key", "tombstone", "another order"],
)
def test_a_wrong_output_is_noticed(job: Job, spoil: Callable[[Output], object], said: str) -> None:
    found = output(job)
    spoil(found)
    wrong = Expected.of(job, RECORDS).wrong(found)
    assert wrong is not None
    assert said in wrong


def test_an_empty_output_is_wrong() -> None:
    assert Expected.of("bytes", 10).wrong({0: []}) == "10 records are missing, 0 doubled"


def test_json_may_be_spelt_in_any_way_but_bytes_may_not() -> None:
    found = output("json")
    for records in found.values():
        records[:] = [(k, json.dumps(json.loads(v or b""), indent=1).encode()) for k, v in records]
    assert Expected.of("json", RECORDS).wrong(found) is None
    assert Expected.of("bytes", RECORDS).wrong(found) is not None
