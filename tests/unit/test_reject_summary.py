"""What is shown of the records that used up a reject budget."""

from __future__ import annotations

import json
import pickle

import pytest

from oncely.errors import SAMPLE, OncelyError, RejectSample, RejectSummary, TooManyRejects, masked
from oncely.secrets import Secrets


def record(offset: int, reason: str, value: bytes | None = b"{}") -> RejectSample:
    return RejectSample("orders", 2, offset, "decode", reason, value)


def refused(records: list[RejectSample]) -> RejectSummary:
    return RejectSummary.of([one.reason for one in records], lambda at: [records[n] for n in at])


def test_reasons_are_grouped_and_counted() -> None:
    wrong = [record(n, f"amount: 'n/a {n}' is no number") for n in range(1_200)]
    broken = [record(5_000 + n, f"no JSON at byte {n}") for n in range(34)]
    found = refused([*broken, *wrong])
    assert found.reasons == (
        ("amount: 'n/a 0' is no number", 1_200),
        ("no JSON at byte 0", 34),
    )
    assert found.lines()[:2] == [
        "1,200 x amount: 'n/a 0' is no number",
        "34 x no JSON at byte 0",
    ]


def test_the_sample_is_bounded_and_holds_records_of_every_reason() -> None:
    found = refused([*(record(n, "frequent") for n in range(1_000)), record(1_000, "rare")])
    assert len(found.records) == SAMPLE
    assert {one.reason for one in found.records} == {"frequent", "rare"}
    many = refused([record(n, "reason " + chr(97 + n % 26) * 5) for n in range(1_000)])
    assert len(many.records) == SAMPLE


def test_an_error_shows_where_the_records_are_and_what_they_hold() -> None:
    error = TooManyRejects(
        "1 record",
        way_out="correct it",
        refused=refused([record(17, "no JSON", b"not json")]),
    )
    again: OncelyError = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error).splitlines() == [
        "sink.max_rejects: 1 record",
        "  1 x no JSON",
        "  for example orders-2 offset 17: no JSON; value not json",
        "  way out: correct it",
    ]


def test_values_are_shortened_and_secrets_taken_out() -> None:
    value = b"x" * 190 + b"hunter2-hunter2" + b"y" * 5_000
    records = [record(1, "refused: hunter2-hunter2", value), record(2, "gone", None)]
    error = TooManyRejects("too many", refused=refused(records))
    error.hide(Secrets.of(["hunter2-hunter2"]))
    found = error.refused
    text = "\n".join([*found.lines(), *found.as_json_lines()])
    assert "hunter2" not in text
    assert "y" * 200 not in text
    shown = [json.loads(line) for line in found.as_json_lines()]
    assert shown[0] == {"reason": "refused: ***", "records": 1}
    assert shown[2]["value"].startswith("x" * 190 + "***")
    assert (shown[3]["offset"], shown[3]["value"]) == (2, None)


@pytest.mark.parametrize(
    ("reason", "left"),
    [
        ("email: 'ann@shop.example' is no number", "email: … is no number"),
        ('invalid input syntax for type bigint: "x 1"', "invalid input syntax for type bigint: …"),
        (
            'violates "u" (Key (email)=(ann@shop.example) already exists.)',
            "violates … (Key (email)=…",
        ),
        (
            "violates check (Failing row contains (ann, (x), 7).)",
            "violates check (Failing row contains …",
        ),
        ("no JSON at byte 17.5", "no JSON at byte …"),
        ("it can't be 'ann'", "it can't be …"),
        ("no boolean: 'a long value that is cut…", "no boolean: …"),
        ("no JSON", "no JSON"),
    ],
)
def test_a_masked_reason_quotes_nothing_of_the_record(reason: str, left: str) -> None:
    assert masked(reason) == left
